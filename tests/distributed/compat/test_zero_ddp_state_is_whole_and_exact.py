"""`state_dict` is what the plain module would save, in float32, and loads into both exactly."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.errors import ConfigurationError, ShardwiseError
from tests.distributed.compat.zero_ddp_kit import MODES, adamw, build, exact
from tests.kit.models import CASES
from tests.kit.oracle import OracleOptions, assert_bit_equal, run_oracle, seed

if TYPE_CHECKING:
    from shardwise.compat.colossalai import ZeroDDP


class Everything(nn.Module):
    """A tie, a batch norm, a buffer of each kind, extra state, and a parameter on the root."""

    def __init__(self) -> None:
        super().__init__()
        self.hanging = nn.Parameter(torch.randn(5))
        self.embedding = nn.Embedding(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.frozen = nn.Linear(5, 5, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.output = nn.Linear(5, 7, bias=False)
        self.output.weight = self.embedding.weight
        self.register_buffer("scale", torch.tensor(1.5, dtype=torch.float64))
        self.register_buffer("offset", torch.randn(5), persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.note = "new"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.frozen(self.norm(self.embedding(tokens) * self.hanging)))


def loss_of(model: nn.Module) -> Tensor:
    return model(torch.randint(7, (6,))).float().square().mean()


def wrapped(**arguments: Any) -> tuple[ZeroDDP, sw.ShardedOptimizer]:
    return build(Everything, mixed_precision=torch.bfloat16, **arguments)


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def random_state(rank: int = 0) -> dict[str, Any]:
    """Return a state that no 16-bit parameter could hold."""
    torch.manual_seed(5 + rank)
    model = Everything()
    model.norm.running_mean.normal_()
    with torch.no_grad():
        model.frozen.weight.copy_(model.frozen.weight.bfloat16())
    model.note = "loaded"
    return model.state_dict()


@pytest.mark.world_size(1, 2, 3)
def test_a_new_wrapper_saves_what_the_plain_module_does(world_size: int) -> None:
    """All names in their order, tied ones too, without what is not persistent."""
    torch.manual_seed(0)
    plain = Everything()
    with torch.no_grad():
        plain.frozen.weight.copy_(plain.frozen.weight.bfloat16())
    expected = plain.state_dict()
    for mode in MODES:
        model, _ = wrapped(**mode)
        state = model.state_dict(only_rank_0=False)
        assert list(state) == list(expected)
        assert_bit_equal(tensors(state), tensors(expected))
        assert state["_extra_state"] == {"note": "new"}
        assert all(value.device.type == "cpu" for value in tensors(state).values())
        tied = state["output.weight"].data_ptr() == state["embedding.weight"].data_ptr()
        assert tied
        with_prefix = model.state_dict(prefix="a.", only_rank_0=False)
        assert list(with_prefix) == [f"a.{name}" for name in expected]
        once = model.state_dict(strict=False, only_rank_0=False)
        assert list(once) == [name for name in expected if name != "output.weight"]
        first_only = model.state_dict()
        assert list(first_only) == ([] if dist.get_rank() else list(expected))
        into: dict[str, Any] = {"mine": 1}
        assert model.state_dict(into) is into
        assert list(into) == ["mine", *first_only]
        with pytest.raises(ConfigurationError, match="keep_vars"):
            model.state_dict(keep_vars=True)


@pytest.mark.world_size(1, 2, 3)
def test_every_state_is_taken_to_the_bit(world_size: int) -> None:
    """Before a step and after one; both kinds of dict; a step at rate 0 keeps what was loaded."""
    for mode in MODES:
        model, optimizer = wrapped(**mode)
        for has_stepped in (False, True):
            new = random_state(rank=has_stepped)
            if has_stepped:
                optimizer.param_groups[0]["lr"] = 0.1
                optimizer.backward(loss_of(model))
                optimizer.step()
                optimizer.zero_grad()
            assert str(model.load_state_dict(new)) == "<All keys matched successfully>"
            state = model.state_dict(only_rank_0=False)
            assert_bit_equal(tensors(state), tensors(new), what=str(mode))
            assert model.module.note == "loaded"
            model.load_state_dict(state, strict=True)
            model.load_state_dict(model.state_dict(strict=False, only_rank_0=False), strict=False)
            with torch.no_grad():
                model(torch.arange(7))
            optimizer.param_groups[0]["lr"] = 0.0
            optimizer.backward(loss_of(model.eval()))
            optimizer.step()
            optimizer.zero_grad()
            model.train()
            state = model.state_dict(only_rank_0=False)
            names = [name for name, _ in model.named_parameters()]
            assert_bit_equal({n: state[n] for n in names}, {n: new[n] for n in names})


@pytest.mark.world_size(2)
def test_a_file_of_the_first_rank_continues_anywhere() -> None:
    """In a new wrapper of any mode and in the plain module, with the numbers of no interruption."""
    case = CASES["gpt"]
    options = OracleOptions(world_size=2, num_steps=3, param_dtype=torch.bfloat16)
    records = run_oracle(case.build, adamw, case.loss, options)

    def train(model: ZeroDDP, optimizer: sw.ShardedOptimizer, steps: range) -> None:
        for step in steps:
            seed(step=step, rank=dist.get_rank(), micro_batch=0)
            optimizer.backward(case.loss(model))
            optimizer.step()
            optimizer.zero_grad()

    for mode in MODES:
        model, optimizer = build(case.build, mixed_precision=torch.bfloat16, **mode)
        train(model, optimizer, range(2))
        file = io.BytesIO()
        torch.save(model.state_dict(), file)
        files: list[Any] = [file.getvalue() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(files)
        saved = torch.load(io.BytesIO(files[0]))
        plain = case.build()
        plain.load_state_dict(saved)
        assert_bit_equal(dict(plain.named_parameters()), records[1].parameters)
        moments = optimizer.state_dict()
        for other in MODES:
            resumed, own = build(case.build, mixed_precision=torch.bfloat16, **other)
            resumed.load_state_dict(saved)
            own.load_state_dict(moments)
            train(resumed, own, range(2, 3))
            assert_bit_equal(exact(resumed), records[2].parameters, what=f"{mode} to {other}")


@pytest.mark.world_size(1, 2)
def test_a_state_that_does_not_fit_is_refused_untouched(world_size: int) -> None:
    """In torch's words, those of the plain module to the letter."""
    for mode in MODES:
        model, _ = wrapped(**mode)
        before = model.state_dict(only_rank_0=False)
        for change in ("missing", "old", "unexpected", "shape", "all"):
            new = random_state()
            if change == "old":  # only a state of older versions may lack it
                del new["norm.num_batches_tracked"]
            if change in ("missing", "all"):
                del new["norm.running_mean"], new["hanging"]
            if change in ("unexpected", "all"):
                new["norm.more"] = torch.ones(2)
            if change in ("shape", "all"):
                new["output.weight"] = torch.ones(3, 5)
            with pytest.raises(RuntimeError) as expected:
                Everything().load_state_dict(new)
            with pytest.raises(RuntimeError) as caught:
                model.load_state_dict(new)
            assert str(caught.value) == str(expected.value)
            assert_bit_equal(tensors(model.state_dict(only_rank_0=False)), tensors(before))
            assert model.module.note == "new"
        partial = {"hanging": torch.randn(5), "more": torch.ones(2)}
        result = model.load_state_dict(partial, strict=False)
        assert result == Everything().load_state_dict(partial, strict=False)
        assert result.unexpected_keys == ["more"]
        state = model.state_dict(only_rank_0=False)
        expected_state = tensors(before) | {"hanging": partial["hanging"]}
        assert_bit_equal(tensors(state), expected_state)
        with pytest.raises(ConfigurationError, match="assign"):
            model.load_state_dict(state, assign=True)


@pytest.mark.world_size(2)
def test_ranks_that_load_different_states_all_raise() -> None:
    """As when the dict of the first rank alone is passed on."""
    for mode in MODES:
        model, _ = wrapped(**mode)
        before = exact(model)
        for strict in (True, False):
            state = model.state_dict()
            with pytest.raises(ConfigurationError, match="on every rank"):
                model.load_state_dict(state, strict=strict)
        assert_bit_equal(exact(model), before)


@pytest.mark.world_size(1, 2)
def test_values_written_by_hand_are_saved(world_size: int) -> None:
    for mode in MODES:
        model, _ = wrapped(**mode)
        with sw.full_parameters(model, writeback=True), torch.no_grad():
            model.module.hanging.fill_(0.375)
        state = model.state_dict(only_rank_0=False)
        assert torch.equal(state["hanging"], torch.full((5,), 0.375))
        with torch.no_grad():
            model.module.hanging.copy_(torch.full((5,), 0.625))
        state = model.state_dict(only_rank_0=False)
        assert torch.equal(state["hanging"], torch.full((5,), 0.625))
        if world_size > 1 and "strict_ddp_mode" not in mode:
            with sw.full_parameters(model), pytest.raises(ShardwiseError, match="leave"):
                model.state_dict()


@pytest.mark.world_size(2)
def test_buffers_keep_their_dtype_and_statistics_stay_float32() -> None:
    model, _ = wrapped()
    for value in (0.1, 1000.1):
        model.module.get_buffer("norm.running_mean").fill_(value)
        state = model.state_dict(only_rank_0=False)
        assert torch.equal(state["norm.running_mean"], torch.full((5,), value))
        loss_of(model)
    assert state["scale"].dtype is torch.float64
    assert state["count"].dtype is torch.int64
    assert model.module.get_buffer("norm.running_var").dtype is torch.float32
    assert {p.dtype for p in model.module.norm.parameters()} == {torch.float32}
