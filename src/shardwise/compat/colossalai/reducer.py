"""``Reducer``: sum many small tensors over ranks in few collectives.

The engine has its own way (chunks); this serves scripts that call the class directly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

_Key = tuple[torch.dtype, torch.device, "dist.ProcessGroup | None"]

MEBIBYTE = 2**20


class _Bucket:
    """One flat buffer that is filled, summed and handed out in views."""

    def __init__(self, numel: int, like: torch.Tensor) -> None:
        """Allocate for tensors of one dtype on one device."""
        self._buffer = torch.empty(numel, dtype=like.dtype, device=like.device)
        self._used_numel = 0

    def has_room_for(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor still fits."""
        return self._used_numel + tensor.numel() <= self._buffer.numel()

    def append(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor in and return the view that will hold its sum."""
        view = self._buffer.narrow(0, self._used_numel, tensor.numel()).view(tensor.shape)
        self._used_numel += tensor.numel()
        return view.copy_(tensor)

    def filled(self) -> torch.Tensor:
        """Return the part in use."""
        return self._buffer.narrow(0, 0, self._used_numel)


@dataclass(frozen=True, slots=True)
class _Delivery:
    """A sum that a caller waits for."""

    view: torch.Tensor
    callback: Callable[[torch.Tensor], object] | None


class Reducer:
    """Sums tensors over a group through buckets, and calls back in the order of the calls.

    There is one bucket per dtype, device and group. A tensor that does not fit flushes first; one
    as large as a bucket is summed by itself, in place.

    Args:
        bucket_size_mb: MiB of a bucket; 0 or less sums every tensor by itself.

    Example:
        >>> reducer = Reducer(bucket_size_mb=1)
        >>> reducer.all_reduce_async(torch.ones(2), None, print)
        >>> reducer.flush()
        tensor([1., 1.])
    """

    def __init__(self, bucket_size_mb: float = 25) -> None:
        self._bucket_bytes = max(0, int(bucket_size_mb * MEBIBYTE))
        self._buckets: dict[_Key, _Bucket] = {}
        self._waiting: list[_Delivery] = []

    def all_reduce_async(
        self,
        tensor: torch.Tensor,
        group: dist.ProcessGroup | None,
        callback_fn: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        """Take a tensor to be summed over ``group`` by the next ``flush`` at the latest.

        Args:
            tensor: Unchanged, unless it is summed by itself.
            group: The ranks; None for all. All of them make the same calls in the same order.
            callback_fn: Is given the sum: a view of a bucket, or the tensor.

        Collectives: an all-reduce of what waits where the tensor has no room, and one of the tensor
        where it is as large as a bucket.
        """
        bucket_numel = self._bucket_bytes // tensor.element_size()
        if tensor.numel() >= bucket_numel:
            self.flush()
            _sum_alone(tensor, group)
            if callback_fn is not None:
                callback_fn(tensor)
            return
        key = (tensor.dtype, tensor.device, group)
        if key in self._buckets and not self._buckets[key].has_room_for(tensor):
            self.flush()
        if key not in self._buckets:
            self._buckets[key] = _Bucket(bucket_numel, tensor)
        self._waiting.append(_Delivery(self._buckets[key].append(tensor), callback_fn))

    @torch.no_grad()
    def flush(self) -> None:
        """Sum everything that waits and call back. Collectives: one all-reduce per bucket in use.

        Buckets are let go, since callbacks may keep their views.
        """
        buckets, self._buckets = self._buckets, {}
        waiting, self._waiting = self._waiting, []
        works = [_start_sum(bucket.filled(), group) for (_, _, group), bucket in buckets.items()]
        for work in works:
            if work is not None:
                work.wait()
        for delivery in waiting:
            if delivery.callback is not None:
                delivery.callback(delivery.view)

    def free(self) -> None:
        """Forget what waits, and its memory."""
        self._buckets.clear()
        self._waiting.clear()


def _start_sum(buffer: torch.Tensor, group: dist.ProcessGroup | None) -> dist.Work | None:
    """Start to sum a contiguous tensor in place; without a group there is nothing to add."""
    if not dist.is_initialized():
        return None
    return dist.all_reduce(buffer, group=group, async_op=True)


@torch.no_grad()
def _sum_alone(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Sum one tensor in place, whatever its strides."""
    whole = tensor.contiguous()
    work = _start_sum(whole, group)
    if work is not None:
        work.wait()
    if whole is not tensor:
        tensor.copy_(whole)
