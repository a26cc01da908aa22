"""Memory, hooks and half states that a step, an error or a deleted model must not leave behind."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import shardwise as sw
from tests.kit.oracle import assert_bit_equal
from tests.kit.pair import Pair, Setting, parameters, sgd


class Blocks(nn.Module):
    """Norms and linear layers; a norm saves its weight, a linear layer a view of it."""

    def __init__(self, num_blocks: int = 6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(num_blocks)
        )
        self.interrupt: BaseException | None = None

    def forward(self, x):
        x = x * self.scale
        for number, block in enumerate(self.blocks):
            if number == 3 and self.interrupt is not None:
                raise self.interrupt
            x = torch.tanh(block(x))
        return x


def loss(model, rank):
    return model(torch.randn(3, 8)).square().mean()


def held_by_parameters(model: nn.Module) -> int:
    """Bytes of the storages that parameters refer to, whatever the accounting says."""
    with torch._C.DisableTorchFunctionSubclass():
        storages = {p.untyped_storage()._cdata: p.untyped_storage() for p in model.parameters()}
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.world_size(2)
@pytest.mark.parametrize("keep", [True, 1000, False])
def test_absent_parameters_hold_no_memory(keep) -> None:
    model = sw.shard(Blocks(), reshard_after_forward=keep)
    optimizer = sw.ShardedOptimizer(sgd(model))
    few = 8 * 4 * len(list(model.parameters()))  # a placeholder has one element
    assert held_by_parameters(model) <= few
    for step in range(4):
        model.requires_grad_(step % 2 == 0)
        model.blocks[0].requires_grad_(True)
        optimizer.backward(loss(model, 0))
        optimizer.step()
        optimizer.zero_grad()
        assert held_by_parameters(model) <= few, step
    with torch.no_grad():
        model(torch.ones(1, 8))
    assert keep is not True or held_by_parameters(model) <= few


@pytest.mark.world_size(2)
def test_a_deleted_model_is_collected() -> None:
    model = sw.shard(Blocks())
    optimizer = sw.ShardedOptimizer(sgd(model))
    optimizer.backward(loss(model, 0))
    optimizer.step()
    watched = [weakref.ref(model), weakref.ref(optimizer._binding.engines()[0])]
    del model, optimizer
    gc.collect()  # the module; its hooks let go of the engine
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


@pytest.mark.world_size(2)
@pytest.mark.parametrize("recover", ["zero_grad", "step"])
def test_training_goes_on_after_an_interrupt(recover: str) -> None:
    """Torch calls no hooks after a KeyboardInterrupt."""
    pair = Pair(Blocks, sgd, setting=Setting(stage=3))
    pair.train(loss, num_steps=2)
    pair.model.interrupt = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        loss(pair.model, 0)
    pair.model.interrupt = None
    pair.optimizer.zero_grad() if recover == "zero_grad" else pair.optimizer.step()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    pair.train(loss, num_steps=3)


@pytest.mark.world_size(2)
def test_a_state_dict_that_raised_changes_no_later_one() -> None:
    model = sw.shard(Blocks())
    optimizer = sw.ShardedOptimizer(sgd(model))

    def fail(*_: object) -> None:
        raise ValueError("no")

    handle = model.blocks[4].register_state_dict_post_hook(fail)
    with pytest.raises(ValueError, match="no"):
        model.state_dict()
    handle.remove()
    optimizer.backward(loss(model, 0))
    optimizer.step()
    for part in (model.blocks, model):
        state = part.state_dict()
        assert_bit_equal(dict(state), parameters(model) if part is model else _of(model))
    with pytest.raises(sw.ShardwiseError, match="full_parameters"):
        model.scale.sum()


def _of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the blocks' parameters."""
    prefix = "blocks."
    whole = parameters(model)
    return {name.removeprefix(prefix): v for name, v in whole.items() if name.startswith(prefix)}


@pytest.mark.world_size(2)
def test_hooks_of_a_user_inside_a_unit_may_keep_what_they_get() -> None:
    class Hooked(Blocks):
        def forward(self, x):
            for block in self.blocks:
                with saved_tensors_hooks(lambda t: t, lambda t: t):
                    x = torch.tanh(block[1](block[0](x)))
            return x

    Pair(Hooked, sgd, setting=Setting(stage=3)).train(loss)


@pytest.mark.world_size(2)
@pytest.mark.parametrize("how", ["load_state_dict", "full_parameters"])
def test_backward_over_a_graph_older_than_a_write_is_refused(how: str) -> None:
    model = sw.shard(Blocks())
    state = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    out = model(torch.randn(2, 8, requires_grad=True)).sum()
    if how == "load_state_dict":
        model.load_state_dict(state)
    else:
        with sw.full_parameters(model, writeback=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    with pytest.raises(RuntimeError, match=r"updated since|inplace"):
        out.backward()
    model.zero_grad()
    with torch.no_grad():
        assert not model(torch.ones(1, 8)).any()


@pytest.mark.world_size(2)
def test_a_replaced_data_attribute_inside_forward_is_kept() -> None:
    class Replaces(Blocks):
        def forward(self, x):
            if self.scale.data.sum() == 8:
                self.scale.data = self.scale.data * 0.5
            return super().forward(x)

    model = sw.shard(Replaces())
    with torch.no_grad():
        model(torch.ones(1, 8))
    assert torch.equal(model.state_dict()["scale"], torch.full((8,), 0.5))


@pytest.mark.world_size(2)
def test_views_with_a_pending_sign_keep_it() -> None:
    class Signed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 2))

        def forward(self, x):
            return x * torch.view_as_complex(self.weight).conj().imag

    def signed_loss(model, rank):
        x = torch.randn(8, requires_grad=True)
        out = model(x).square().sum()
        (grad,) = torch.autograd.grad(out, x, create_graph=True)
        return out + grad.square().sum()

    Pair(Signed, sgd, setting=Setting(stage=3)).train(signed_loss)


@pytest.mark.world_size(2)
def test_a_write_while_a_chunk_is_arriving_is_what_forward_uses() -> None:
    """An early exit leaves gathers that were started ahead; what they bring is old by then."""

    class Early(Blocks):
        stop = 6

        def forward(self, x):
            for block in self.blocks[: self.stop]:
                x = torch.tanh(block(x))
            return x

    torch.manual_seed(0)
    plain = Early()
    model = sw.shard(Early())
    x = torch.ones(1, 8)
    for _ in range(2):
        model(x)
    model.stop = 1
    model(x)
    arriving = [b[1].weight._shardwise.chunk.presence.name == "GATHERING" for b in model.blocks]
    assert any(arriving)
    model.load_state_dict(plain.state_dict())
    model.stop = 6
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
