"""Statistics of the first sharded pass are those that a plain pass gave before."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from shardwise.compat.colossalai import GeminiManager, MemStats, RuntimeMemTracer
from tests.distributed.compat.gemini_kit import build, check, manager_of, take_step
from tests.kit.models import CASES
from tests.kit.oracle import seed

NAMES = ("gpt", "gpt-untied", "gpt-reentrant", "gpt-non-reentrant", "mlp", "lstm", "odd-shapes")


def traced(name: str) -> tuple[torch.nn.Module, MemStats]:
    """Record one pass of the plain model."""
    torch.manual_seed(0)
    model = CASES[name].build()
    tracer = RuntimeMemTracer(model)
    seed(step=0, rank=0, micro_batch=0)
    tracer.backward(CASES[name].loss(tracer))  # type: ignore[arg-type]
    return model, tracer.memstats()


@pytest.mark.world_size(1, 2, 4, timeout_s=60)
def test_steps_and_their_parameters_are_those_of_a_plain_pass(world_size: int) -> None:
    for name in NAMES:
        for chunk_numel in (500, 5000):
            plain, expected = traced(name)
            manager = manager_of("const", chunk_numel=chunk_numel)
            model, optimizer = build(CASES[name].build, manager=manager, dtype=None)
            assert manager.is_warmup()
            assert manager.memstats is None
            take_step(model, optimizer, CASES[name], 0)
            assert not manager.is_warmup()
            stats = manager.memstats
            assert stats is not None
            assert stats.num_steps == expected.num_steps, name
            mine = dict(model.named_parameters())
            for parameter_name, parameter in plain.named_parameters():
                uses = stats.param_used_step(mine[parameter_name])
                assert uses == expected.param_used_step(parameter), (name, parameter_name)
            take_step(model, optimizer, CASES[name], 1)
            assert manager.memstats is stats
            assert stats.num_steps == expected.num_steps, "later passes are not recorded"


@pytest.mark.world_size(1, 2, timeout_s=60)
def test_statistics_given_before_need_no_warm_up_and_change_no_number(world_size: int) -> None:
    """Names stay with their parameters, whatever order the statistics have them in."""
    for policy in ("cuda", "cpu", "const"):
        _, stats = traced("gpt")
        manager = GeminiManager(policy, manager_of(policy).chunk_manager, stats)
        assert not manager.is_warmup()
        assert manager.memstats is stats
        count = stats.num_steps
        check(CASES["gpt"], manager, what=policy)
        assert (manager.memstats, stats.num_steps) == (stats, count)


@pytest.mark.world_size(2, timeout_s=60)
def test_policies_that_do_not_look_ahead_record_nothing() -> None:
    for policy in ("cuda", "cpu", "static"):
        manager = manager_of(policy)
        model, optimizer = build(CASES["gpt"].build, manager=manager)
        assert not manager.is_warmup()
        take_step(model, optimizer, CASES["gpt"], 0)
        assert manager.memstats is None


@pytest.mark.world_size(2, timeout_s=60)
def test_evaluation_before_training_is_no_warm_up_of_another_length() -> None:
    """An evaluation shifts no later answer: steps are counted from the pass that trains."""
    manager = manager_of("const")
    model, optimizer = build(CASES["gpt"].build, manager=manager)
    with torch.no_grad():
        seed(step=0, rank=0, micro_batch=0)
        CASES["gpt"].loss(model)
    assert manager.is_warmup()
    _, expected = traced("gpt")
    take_step(model, optimizer, CASES["gpt"], 0)
    assert manager.memstats is not None
    assert manager.memstats.num_steps == expected.num_steps


@pytest.mark.world_size(2, timeout_s=60)
def test_a_manager_that_is_kept_keeps_no_model() -> None:
    """A cache of decisions that is keyed by managers and chunks keeps both, and all their bytes."""
    for policy in ("cuda", "cpu", "const"):
        manager = manager_of(policy)
        model, optimizer = build(CASES["gpt"].build, manager=manager)
        for step in range(2):
            take_step(model, optimizer, CASES["gpt"], step)
        engine = model.module.__dict__["_shardwise"]
        watched = [weakref.ref(one) for one in (model, model.module, engine, engine.chunks[0])]
        del model, optimizer, engine
        gc.collect()
        gc.collect()  # what hooks held is found unreachable by the first
        assert [ref() for ref in watched] == [None] * len(watched), policy
        assert manager.chunk_manager.total_mem == {"cpu": 0, "cuda": 0}
        build(CASES["gpt"].build, manager=manager)  # and may serve the next
