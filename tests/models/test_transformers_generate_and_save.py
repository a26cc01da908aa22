"""A sharded model of the `transformers` library generates, saves itself, and is loaded to train."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import Pair, Setting, parameters
from tests.models.tiny import TINY, gpt2, llama, tokens

NUM_NEW = 6
NEVER_SEEN = 3
"""A token that is not in any batch, and that the model therefore never prefers."""


def trained_pair(name: str) -> Pair:
    pair = Pair(TINY[name].build, setting=Setting(stage=3))
    pair.train(TINY[name].loss, num_steps=1)
    return pair


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_generation_between_steps_gives_the_tokens_of_one_process(name) -> None:
    """Every rank has a prompt of its own; all generate equally many tokens."""
    pair = trained_pair(name)
    for _ in range(2):
        prompt = tokens(length=4)
        pair.both(lambda model: model.eval())
        mine, plain = (
            model.generate(prompt, max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False)
            for model in (pair.model, pair.plain)
        )
        assert mine.shape == (2, 4 + NUM_NEW)
        assert torch.equal(mine, plain)
        pair.both(lambda model: model.train())
        pair.train(TINY[name].loss, num_steps=1)


@pytest.mark.world_size(2)
def test_ranks_may_end_their_sequences_at_different_tokens() -> None:
    """With `synced_gpus` a rank that has ended goes on calling the model until all have."""
    pair = trained_pair("gpt2")
    pair.both(lambda model: model.eval())
    torch.manual_seed(1 + dist.get_rank())
    prompt = tokens(1, length=4)
    options = {"max_new_tokens": NUM_NEW, "do_sample": False}
    endless = pair.plain.generate(prompt, **options, eos_token_id=NEVER_SEEN)
    first = endless[0, 4].item() if dist.get_rank() == 0 else NEVER_SEEN
    mine, plain = (
        model.generate(prompt, **options, eos_token_id=first, synced_gpus=is_synced)
        for model, is_synced in ((pair.model, True), (pair.plain, False))
    )
    assert torch.equal(mine, plain)
    assert mine.shape[1] == (5 if dist.get_rank() == 0 else 4 + NUM_NEW)


@pytest.mark.world_size(2)
def test_outputs_keep_their_class() -> None:
    for build in (gpt2, llama):
        torch.manual_seed(0)
        plain = build()
        torch.manual_seed(0)
        precision = sw.MixedPrecision(output_dtype=torch.float64)
        for options in ({}, {"mixed_precision": precision}):
            torch.manual_seed(0)
            model = sw.shard(build(), **options)
            for with_grad in (True, False):
                batch = tokens()
                torch.manual_seed(1)
                with torch.set_grad_enabled(with_grad):
                    mine = model(input_ids=batch, labels=batch)
                torch.manual_seed(1)
                other = plain(input_ids=batch, labels=batch)
                assert type(mine) is type(other)
                assert list(mine) == list(other)
                assert mine.logits is mine["logits"]
                assert mine.logits.dtype is (torch.float64 if options else torch.float32)
                assert torch.equal(mine.logits, other.logits.to(mine.logits.dtype))
                assert torch.equal(mine.loss, other.loss.to(mine.loss.dtype))


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen_moe"])
def test_saved_weights_are_those_of_one_process(name, tmp_path) -> None:
    """Saving is collective; the first rank writes, in several files, and all ranks read.

    Files hold every expert of `qwen_moe` by itself.
    """
    pair = trained_pair(name)
    is_main_process = dist.get_rank() == 0
    pair.model.save_pretrained(tmp_path, is_main_process=is_main_process, max_shard_size="20KB")
    dist.barrier()
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    loaded, notes = type(pair.plain).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(notes.values()), notes
    assert_bit_equal(parameters(loaded), parameters(pair.plain))
    is_tied = loaded.lm_head.weight is loaded.get_input_embeddings().weight
    assert is_tied == (name == "gpt2")
    pair.train(TINY[name].loss, num_steps=1)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_loaded_models_train_like_one_process(name, tmp_path) -> None:
    torch.manual_seed(7)
    plain = TINY[name].build()
    plain.save_pretrained(tmp_path)  # the first rank writes
    dist.barrier()
    pair = Pair(lambda: type(plain).from_pretrained(tmp_path).train(), setting=Setting(stage=3))
    assert_bit_equal(parameters(pair.model), parameters(plain))
    pair.train(TINY[name].loss, num_steps=3)
