"""The chunk search under that library's names: its known answers, and none of its faults."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from shardwise.compat.colossalai import (
    ChunkManager,
    ColoDDP,
    RuntimeMemTracer,
    init_chunk_manager,
    search_chunk_configuration,
)
from shardwise.errors import ConfigurationError
from tests.unit.layout.test_common_size import LARGE_GPT, SMALL_GPT

MEBI = 2**20


class Weights(nn.Module):
    """Parameters of given sizes, without values."""

    def __init__(self, numels: list[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        empty = partial(torch.empty, dtype=dtype, device="meta")
        self.weights = nn.ParameterList([nn.Parameter(empty(numel)) for numel in numels])


def search(model: nn.Module, range_mb: float, interval: int, **rest: Any) -> tuple[int, int]:
    """Return size and waste."""
    configuration, waste = search_chunk_configuration(model, range_mb, interval, **rest)
    [entry] = configuration.values()
    return entry["chunk_size"], waste


@pytest.mark.parametrize(
    ("numels", "interval_numel", "answer"),
    [(SMALL_GPT, 16, 31616), (LARGE_GPT, 128, 527872)],
    ids=["small", "large"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_the_known_answers_hold_in_bytes_of_any_dtype(
    numels: list[int], interval_numel: int, answer: int, dtype: torch.dtype
) -> None:
    interval, range_mb = interval_numel * dtype.itemsize, dtype.itemsize
    model = Weights(numels, dtype)
    assert search(model, range_mb, interval, min_chunk_size_mb=0) == (answer, 0)


def test_the_small_answer_holds_for_the_call_of_that_library() -> None:
    assert search(Weights(SMALL_GPT), 1, 16, min_chunk_size_mb=0) == (31616, 0)


def test_bytes_are_not_compared_with_elements() -> None:
    """20 Mi elements of float32 are 80 MiB: too large to be kept whole on every rank."""
    model = Weights([5 * MEBI] * 4)
    configuration, _ = search_chunk_configuration(model, 32, 1024)
    assert configuration == {1: {"chunk_size": 10 * MEBI, "keep_gathered": False}}
    half, waste = search_chunk_configuration(Weights([5 * MEBI] * 4, torch.float16), 32, 1024)
    assert not half[1]["keep_gathered"]
    configuration, waste = search_chunk_configuration(Weights([7 * MEBI], torch.float32), 32, 1024)
    assert (configuration, waste) == ({1: {"chunk_size": 7 * MEBI, "keep_gathered": True}}, 0)


def test_exceptionally_large_parameters_may_take_part() -> None:
    """Also through `init_chunk_manager`, where a False that is asked for its truth is lost."""
    model = Weights(LARGE_GPT)
    manager = init_chunk_manager(model, min_chunk_size_mb=0, filter_exlarge_params=False)
    assert manager.settings_for(1).chunk_numel >= max(LARGE_GPT)
    manager = init_chunk_manager(model, min_chunk_size_mb=0)
    assert manager.settings_for(1).chunk_numel < max(LARGE_GPT)


def test_a_model_of_nothing_but_large_parameters_has_an_answer() -> None:
    assert search(Weights([1000]), 0, 4, min_chunk_size_mb=0) == (1000, 0)
    assert search(Weights([1000, 1000]), 0, 4, min_chunk_size_mb=0) == (1000, 0)


def test_ignored_parameters_are_skipped_and_tied_ones_count_once() -> None:
    model = nn.Sequential(nn.Linear(10, 10, bias=False), nn.Linear(10, 10, bias=False))
    model[1].weight = model[0].weight
    assert search(model, 0, 4, min_chunk_size_mb=0) == (100, 0)
    model.append(nn.Linear(50, 50, bias=False))
    ColoDDP.set_params_to_ignore(model[2].parameters())
    assert search(model, 0, 4, min_chunk_size_mb=0) == (100, 0)


class Alternating(nn.Module):
    """Has two large weights, then two small ones, and uses them by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.large = nn.ParameterList([nn.Parameter(torch.ones(60)) for _ in range(2)])
        self.small = nn.ParameterList([nn.Parameter(torch.ones(40)) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for large, small in zip(self.large, self.small, strict=True):
            x = x * torch.sum(large)
            x = x * torch.sum(small)
        return x


def test_chunks_are_filled_in_the_order_of_a_trace() -> None:
    """60 | 60 40 | 40 leaves a chunk of 100 more unused than 60 40 | 60 40."""
    model = Alternating()
    tracer = RuntimeMemTracer(model)
    tracer.backward(tracer(torch.ones(1)).sum())
    stats = tracer.memstats()
    (large, larger), (small, smaller) = model.large, model.small
    assert stats.param_order() == [large, small, larger, smaller]
    sizes = {"min_chunk_size_mb": 100 * 4 / MEBI}
    assert search(model, 0, 4, **sizes) == (100, 100)
    assert search(model, 0, 4, **sizes, memstats=stats) == (100, 0)


@pytest.mark.parametrize(
    ("model", "arguments"),
    [
        (nn.Sequential(), (1, 16)),
        (nn.Linear(4, 2), (1, 0)),
        (nn.Linear(4, 2), (-1, 16)),
        (nn.Linear(4, 2), (1, 16, -1)),
    ],
    ids=["no parameters", "no interval", "negative range", "negative size"],
)
def test_what_cannot_be_searched_is_refused(model: nn.Module, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigurationError, match="search_chunk_configuration"):
        search_chunk_configuration(model, *arguments)


def test_the_callers_configuration_stays_as_it_was() -> None:
    configuration = {1: {"chunk_size": 64, "keep_gathered": False}}
    for _ in range(2):
        manager = ChunkManager(configuration, torch.device("cpu"))
        assert manager.settings_for(1).chunk_numel == 64
    assert configuration == {1: {"chunk_size": 64, "keep_gathered": False}}


@pytest.mark.parametrize(
    "configuration",
    [
        {1: {"keep_gathered": False}},
        {1: {"chunk_size": 0}},
        {1: {"chunk_size": 1.5}},
        {0: {"chunk_size": 4}},
        {1: {"chunk_size": 4, "keep_gathered": 1}},
        {1: {"chunk_size": 4, "chunks": 3}},
    ],
    ids=["no size", "empty", "fraction", "no ranks", "no bool", "unknown"],
)
def test_a_configuration_that_cannot_be_read_is_refused(configuration: Any) -> None:
    with pytest.raises(ConfigurationError, match="chunk_configuration"):
        ChunkManager(configuration)
