"""What autograd saves instead of views of gathered chunks, so that they may be released.

While a unit runs forward, a saved tensor that lies in a gathered chunk is replaced by a
``ChunkHandle``; backward exchanges it for a view of the chunk, gathered again if need be.
Everything else is saved as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from shardwise.errors import ShardwiseError, mismatch
from shardwise.runtime.chunk import Presence
from shardwise.runtime.managed import local_part
from shardwise.runtime.meter import Holding

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.gatherer import Gatherer
    from shardwise.runtime.meter import Meter


class ChunkHandle:
    """One saved view of a chunk."""

    __slots__ = ("chunk", "offset", "size", "spec", "stride", "update")

    def __init__(self, chunk: Chunk, view: torch.Tensor, spec: DTensorSpec | None) -> None:
        """Describe a view of the chunk's buffer, the local part of a DTensor if it has a spec."""
        self.chunk, self.spec = chunk, spec
        self.size, self.stride = view.size(), view.stride()
        self.offset = view.storage_offset()
        self.update = chunk.num_updates


class SavedViews:
    """Packs and unpacks saved tensors for one gatherer."""

    def __init__(self, gatherer: Gatherer, meter: Meter) -> None:
        """Serve one gatherer; the meter is told what else is saved."""
        self._gatherer = gatherer
        self._meter = meter

    def hooks(self) -> saved_tensors_hooks | None:
        """Return the context in which a unit runs, None where nothing has to change.

        Where a user's hooks are active (recompute, offload) theirs go on, but they are given an
        alias in place of a parameter, whose values would go with the release of its chunk.
        """
        autograd: Any = torch._C._autograd
        if not autograd._saved_tensors_hooks_is_enabled():
            return None  # function transforms forbid hooks: see ManagedParameter.lingers
        outer = autograd._top_saved_tensors_default_hooks(True)
        if outer is None:
            return saved_tensors_hooks(self._pack, self._unpack)
        pack, unpack = outer
        if isinstance(getattr(pack, "__self__", None), SavedViews | _OuterHooks):
            return None
        return saved_tensors_hooks(_OuterHooks(self._gatherer, pack).pack, unpack)

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int] | ChunkHandle:
        """Return what is saved in place of a tensor."""
        is_distributed = isinstance(tensor, DTensor)
        view = local_part(tensor)
        chunk = self._gatherer.owner_of(view)
        if chunk is not None:
            return ChunkHandle(chunk, view, tensor._spec if is_distributed else None)
        self._meter.watch_new(view, Holding.ACTIVATIONS)
        return save(tensor)

    def _unpack(self, saved: tuple[torch.Tensor, int] | ChunkHandle) -> torch.Tensor:
        """Return the tensor that was saved."""
        if not isinstance(saved, ChunkHandle):
            return restore(saved)
        chunk = saved.chunk
        if chunk.num_updates != saved.update:
            raise ShardwiseError(
                mismatch(
                    "backward",
                    expected="parameters as they were in forward",
                    got="parameters that a step has updated since",
                    where=chunk.records[0].name,
                    fix="run backward before the step, or forward again",
                )
            )
        self._gatherer.read_in_backward(chunk)
        assert chunk.presence is Presence.GATHERED
        with torch.no_grad():
            view = chunk.whole_C.as_strided(saved.size, saved.stride, saved.offset)
        return view if saved.spec is None else DTensor(view, saved.spec, requires_grad=False)


class _OuterHooks:
    """Hands saved tensors on to the hooks of a user, none of them a parameter itself."""

    def __init__(self, gatherer: Gatherer, pack: Callable[[torch.Tensor], Any]) -> None:
        """Hand on to ``pack``."""
        self._gatherer = gatherer
        self._outer = pack

    def pack(self, tensor: torch.Tensor) -> Any:  # noqa: ANN401 - whatever the user saves
        """Replace a parameter by an alias, which keeps its memory."""
        is_own = self._gatherer.owner_of(local_part(tensor)) is not None
        return self._outer(tensor.detach() if is_own else tensor)


def save(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return what a hook saves of a tensor that is saved as it is."""
    # detached: a saved output would otherwise hold the graph that holds it
    return tensor.detach(), tensor._version


def restore(saved: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Return a tensor that ``save`` has saved; torch does not check what went through hooks."""
    tensor, version = saved
    if tensor._version != version:
        raise _modified(tensor, version)
    return tensor


def _modified(tensor: torch.Tensor, version: int) -> RuntimeError:
    """Return the error that torch raises for an activation written to after it was saved."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
        f"expected version {version} instead. Hint: enable anomaly detection to find the "
        "operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
