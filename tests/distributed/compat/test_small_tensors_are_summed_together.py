"""`Reducer`: buckets change how many collectives there are, never what is summed or its order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.compat.colossalai import Reducer

MEBIBYTE = 2**20


def tensors(rank: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Ten tensors of growing size."""
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(64, 1 + i, generator=generator).to(dtype) for i in range(10)]


def expected(world_size: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Their sums over ranks."""
    return [sum(parts[1:], parts[0].clone()) for parts in zip(*(tensors(r, dtype) for r in range(world_size)), strict=True)]  # fmt: skip  # noqa: E501


class Counting:
    """Counts all-reduces while it is in place of torch's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        real = dist.all_reduce

        def counted(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.sizes.append(tensor.numel())
            return real(tensor, *args, **kwargs)

        monkeypatch.setattr(dist, "all_reduce", counted)


@pytest.mark.world_size(1, 2)
def test_sums_come_in_the_order_of_the_calls(world_size: int):
    for size_mb, num_collectives in ((1, 1), (0.01, None), (0, 10), (-1, 10)):
        with pytest.MonkeyPatch.context() as patch:
            counting = Counting(patch)
            reducer = Reducer(size_mb)
            sums: list[Tensor] = []
            for tensor in tensors(dist.get_rank()):
                reducer.all_reduce_async(tensor, dist.group.WORLD, sums.append)
            reducer.flush()
            assert num_collectives in (None, len(counting.sizes))
            if num_collectives is None:
                assert 1 < len(counting.sizes) < 10
                assert max(counting.sizes) <= 0.01 * MEBIBYTE // 4
        assert len(sums) == 10
        for actual, wanted in zip(sums, expected(world_size), strict=True):
            assert torch.equal(actual, wanted)


@pytest.mark.world_size(2)
def test_sums_of_earlier_flushes_stay_as_they_were():
    """A bucket that is used again would overwrite what callbacks were given."""
    reducer = Reducer(1)
    kept: list[Tensor] = []
    for value in (1.0, 2.0, 3.0):
        reducer.all_reduce_async(torch.full((5,), value), None, kept.append)
        reducer.flush()
    assert [tensor[0].item() for tensor in kept] == [2.0, 4.0, 6.0]
    reducer.flush()
    assert len(kept) == 3


@pytest.mark.world_size(2)
def test_dtypes_and_large_tensors_share_one_order_and_no_bucket():
    numel = MEBIBYTE // 4
    large = torch.ones(numel)
    sent = [
        torch.ones(3),
        torch.ones(3, dtype=torch.float64),
        large,
        torch.ones(2, 3).t(),
        torch.ones(4, dtype=torch.float64),
    ]
    seen: list[tuple[torch.dtype, tuple[int, ...]]] = []
    reducer = Reducer(1)
    for tensor in sent:
        reducer.all_reduce_async(
            tensor, None, lambda t: seen.append((t.dtype, (*t.shape, int(t.sum()))))
        )
    reducer.flush()
    assert seen == [(t.dtype, (*t.shape, 2 * t.numel())) for t in sent]
    assert torch.equal(large, torch.full((numel,), 2.0))
    assert torch.equal(sent[0], torch.ones(3))


@pytest.mark.world_size(2)
def test_a_large_strided_tensor_is_summed_in_place():
    whole = torch.ones(600, 600)
    Reducer(1).all_reduce_async(whole.t(), None)
    assert torch.equal(whole, torch.full((600, 600), 2.0))


@pytest.mark.world_size(4)
def test_groups_have_buckets_of_their_own():
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[dist.get_rank() // 2]
    reducer = Reducer(1)
    sums: list[float] = []
    for group in (pair, dist.group.WORLD, pair):
        assert isinstance(group, dist.ProcessGroup)
        reducer.all_reduce_async(
            torch.full((3,), 1.0 + dist.get_rank()), group, lambda t: sums.append(t[0].item())
        )
    reducer.flush()
    own = 3.0 if dist.get_rank() < 2 else 7.0
    assert sums == [own, 10.0, own]


@pytest.mark.world_size(2)
def test_freed_tensors_are_forgotten():
    reducer = Reducer(1)
    seen: list[Tensor] = []
    reducer.all_reduce_async(torch.ones(3), None, seen.append)
    reducer.free()
    reducer.flush()
    assert not seen
    reducer.all_reduce_async(torch.ones(3), None, seen.append)
    reducer.flush()
    assert [t.tolist() for t in seen] == [[2.0] * 3]
