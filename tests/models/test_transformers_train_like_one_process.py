"""Models of the `transformers` library train at stage 3 with the bits of one process."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.kit.pair import Pair, Setting, parameters
from tests.models.tiny import TINY, llama, tokens


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", TINY)
def test_five_steps_are_bit_equal(name) -> None:
    tiny = TINY[name]
    Pair(tiny.build, setting=Setting(stage=3)).train(tiny.loss, num_steps=5)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["gpt2", "qwen_moe_by_expert", "switch"])
def test_chunks_smaller_than_blocks_change_no_bit(name) -> None:
    tiny = TINY[name]
    setting = Setting(stage=3, shard={"chunk_bytes": 4096})
    Pair(tiny.build, setting=setting).train(tiny.loss)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_keeping_blocks_gathered_changes_no_bit(name) -> None:
    tiny = TINY[name]
    setting = Setting(stage=3, shard={"reshard_after_forward": False})
    Pair(tiny.build, setting=setting).train(tiny.loss)


RECOMPUTE = {
    "default": ({}, {"use_reentrant": False}),
    "reentrant_kept_gathered": ({"reshard_after_forward": False}, {"use_reentrant": True}),
    "reentrant": ({}, {"use_reentrant": True}),
}


@pytest.mark.world_size(2)
@pytest.mark.parametrize("way", RECOMPUTE)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_checkpointed_activations_change_no_bit(name, way) -> None:
    """The library recomputes inside the blocks' `forward`: while no unit is being called."""
    tiny, (shard, options) = TINY[name], RECOMPUTE[way]
    pair = Pair(tiny.build, setting=Setting(stage=3, shard=shard))
    pair.both(lambda model: model.activation_checkpointing_enable(options))
    pair.train(tiny.loss)


@pytest.mark.parametrize("name", ["qwen_moe", "switch"])
def test_two_ranks_use_different_experts(name) -> None:
    """Otherwise the equality of mixtures of experts would show less than it seems to."""
    used = []
    for rank in range(2):
        torch.manual_seed(0)
        model = TINY[name].build()
        torch.manual_seed(1 + rank)  # as the first pass of a `Pair`
        TINY[name].loss(model, rank).backward()
        gradients = [p.grad for n, p in model.named_parameters() if ".experts." in n]
        if name == "switch":
            used.append([g is not None for g in gradients])
        else:
            used.append([bool(of_one.any()) for stacked in gradients for of_one in stacked])
    assert used[0] != used[1]
    assert any(not mine and not other for mine, other in zip(*used, strict=True))


@pytest.mark.world_size(2)
def test_bfloat16_parameters_learn_a_batch() -> None:
    precision = sw.MixedPrecision(param_dtype=torch.bfloat16)
    model = sw.shard(llama(), mixed_precision=precision)
    optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.manual_seed(dist.get_rank())
    batch = tokens()
    losses = []
    for _ in range(10):
        output = model(input_ids=batch, labels=batch)
        optimizer.backward(output.loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(output.loss.item())
    assert output.logits.dtype is torch.bfloat16
    assert {p.dtype for p in parameters(model).values()} == {torch.bfloat16}
    assert all(later < earlier for earlier, later in itertools.pairwise(losses)), losses
    assert losses[-1] < losses[0] / 2, losses
