"""One parameter under shardwise's care: the record behind ``parameter._shardwise``.

That attribute is the only thing the library stores on a user's tensor; a copy of the tensor does
not carry it along. The record knows its place and the state of its gradient; it starts nothing.
"""

from __future__ import annotations

import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.runtime.absent import ATTRIBUTE
from shardwise.runtime.materialise import replace_value
from shardwise.runtime.placeholder import ShardedGradient

if TYPE_CHECKING:
    from shardwise.layout import Piece, Slot
    from shardwise.runtime.chunk import Chunk
    from shardwise.runtime.engine import Engine


class ManagedParameter:
    """Place and gradient state of one parameter on one rank."""

    def __init__(self, parameter: nn.Parameter, *, name: str, index: int, engine: Engine) -> None:
        """Describe an unpacked parameter; ``Chunk`` gives it a place."""
        self.engine = engine
        self.parameter = parameter
        self.name = name
        self.index = index
        values = local_part(parameter)
        self.shape = values.shape
        """Of the values on this rank: those of a DTensor's local part."""
        self.stride = dense_stride(values)
        self.handle: ShardedGradient | None = None
        self._chunk: Chunk | None = None
        self._slot: Slot | None = None
        self.piece: Piece | None = None
        """The part that this rank owns, None when it owns none of it."""

        self.atom_numel = 1
        """Elements that no cut goes through, as packed."""
        self.is_claimed = False
        """An optimizer updates this parameter."""
        self.is_held = False
        """A reduced gradient lies in the chunk's slice (agreed by all ranks)."""
        self.is_counted = True
        """The norm counts it on this rank: False for copies of what another rank counts."""
        self.is_zero = False
        """The held gradient was zeroed, not removed: no loss scale or weight is part of it."""
        self.is_replaced = False
        """The user has put another gradient in its place since the ranks last agreed."""
        self.is_spent = False
        """The held gradient was part of an update."""
        self.has_arrived = False
        """A gradient of the backward pass that is open was written to the chunk's buffer."""
        self.is_expected = True
        """The chunk waits for this parameter before it is reduced."""
        self.local: torch.Tensor | None = None
        """Gradient gathered under no_sync in a wider dtype than the parameter's."""
        self.late: torch.Tensor | None = None
        """Gradient that came after the chunk was sent (recompute of a shared parameter)."""
        self._accumulated: weakref.ref[torch.Tensor] | None = None
        """What autograd has left in ``parameter.grad`` under no_sync."""
        self.idle_uses = self.idle_references = 0
        """References from C++ and from Python that are no saved tensors, when it was gathered."""
        self.is_disowned = False
        """What was written to the gathered parameter is to be dropped."""
        self.lingers = False
        """A graph saved the absent parameter itself, which therefore keeps its values."""
        self.seen_version = parameter._version
        """Version of the parameter after the last update: a newer one was written by the user."""

    def __deepcopy__(self, memo: dict[int, object]) -> None:
        """A copied parameter is a plain parameter."""
        return

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """An unpickled parameter is a plain parameter."""
        return type(None), ()

    def place(self, chunk: Chunk, slot: Slot, piece: Piece | None) -> None:
        """Take the place that packing chose, and become known to the parameter."""
        self._chunk, self._slot, self.piece = chunk, slot, piece
        setattr(self.parameter, ATTRIBUTE, self)

    @property
    def has_plain_gradient(self) -> bool:
        """A gradient of this rank alone lies in ``parameter.grad``."""
        grad = self.parameter.grad
        return grad is not None and not isinstance(grad, ShardedGradient)

    @property
    def has_local_gradient(self) -> bool:
        """A gradient of this rank alone is waiting to be reduced."""
        return self.has_plain_gradient or self.local is not None

    @property
    def is_assigned(self) -> bool:
        """The gradient in ``parameter.grad`` was put there by the user, not by autograd."""
        grad = self.parameter.grad
        if grad is None or isinstance(grad, ShardedGradient):
            return False
        return self._accumulated is None or self._accumulated() is not grad

    def note_accumulated(self) -> None:
        """Remember what lies in ``parameter.grad`` as a gradient of local passes."""
        grad = self.parameter.grad
        self._accumulated = None if grad is None else weakref.ref(grad)

    @property
    def holds_stand_in(self) -> bool:
        """The parameter's gradient is a stand-in for a reduced one."""
        return isinstance(self.parameter.grad, ShardedGradient)

    @property
    def chunk(self) -> Chunk:
        """The chunk that holds the parameter."""
        assert self._chunk is not None
        return self._chunk

    @property
    def slot(self) -> Slot:
        """The place in the chunk."""
        assert self._slot is not None
        return self._slot

    @property
    def numel(self) -> int:
        """Number of elements of the whole parameter."""
        return self.slot.numel

    @property
    def values(self) -> torch.Tensor:
        """The tensor whose memory holds the values: the parameter, or a DTensor's local part."""
        return local_part(self.parameter)

    @property
    def num_uses(self) -> int:
        """References that C++ holds to the parameter: its node, and graphs that saved it."""
        parameter: Any = self.parameter
        return parameter._use_count()

    def note_idle(self) -> None:
        """Count references while no graph can have saved the parameter: it is being released."""
        self.idle_uses = self.num_uses
        self.idle_references = sys.getrefcount(self.parameter)

    @property
    def is_saved(self) -> bool:
        """True when a graph, or what a user's hooks gave it, may hold the parameter itself."""
        return (
            self.num_uses > self.idle_uses or sys.getrefcount(self.parameter) > self.idle_references
        )

    def lies_in(self, buffer_C: torch.Tensor) -> bool:
        """Return whether the values are where packing has put them."""
        return self.values.untyped_storage()._cdata == buffer_C.untyped_storage()._cdata

    def fill(self, value: torch.Tensor) -> None:
        """Make the parameter a view of packed values."""
        parameter = self.parameter
        if parameter.is_meta:
            replace_value(parameter, value)
            self.seen_version = parameter._version
        elif not isinstance(parameter, DTensor):
            parameter.data = value
        elif value.dtype == parameter.dtype:
            parameter._local_tensor = value
        else:
            replace_value(parameter, self.globalise(value))

    def globalise(self, value: torch.Tensor) -> torch.Tensor:
        """Return a value on this rank in the form that the parameter has."""
        parameter = self.parameter
        if not isinstance(parameter, DTensor):
            return value
        return DTensor.from_local(
            value,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )

    def localise(self, value: torch.Tensor) -> torch.Tensor:
        """Return the part on this rank of a value in the form that the parameter has."""
        parameter = self.parameter
        if isinstance(parameter, DTensor) and isinstance(value, DTensor):
            if value.placements != parameter.placements:
                value = value.redistribute(parameter.device_mesh, parameter.placements)
            return value.to_local()
        return value.expand(self.shape)

    def view_in(self, buffer_C: torch.Tensor) -> torch.Tensor:
        """Return the parameter-shaped view of this parameter's slot in a chunk-sized buffer."""
        return self.view_at(self.slot, buffer_C)

    def view_at(self, slot: Slot, buffer_C: torch.Tensor) -> torch.Tensor:
        """Return the same of another slot, that the parameter had once."""
        return buffer_C.as_strided(self.shape, self.stride, buffer_C.storage_offset() + slot.start)

    def piece_in(self, slice_S: torch.Tensor) -> torch.Tensor | None:
        """Return the 1-D view of the owned piece in a slice-sized buffer."""
        if self.piece is None:
            return None
        return slice_S.narrow(0, self.piece.slice_start, self.piece.numel)

    def cut(self, whole: torch.Tensor) -> torch.Tensor | None:
        """Return the owned piece, 1-D, of a whole value of the parameter's shape."""
        if self.piece is None:
            return None
        flat = whole.new_empty(self.numel)
        flat.as_strided(self.shape, self.stride).copy_(whole)
        return flat.narrow(0, self.piece.parameter_start, self.piece.numel)

    def drop_gradient(self) -> None:
        """Forget the reduced gradient."""
        self.zero_gradient()
        self.is_held = False

    def zero_gradient(self) -> None:
        """Zero the owned piece of the reduced gradient."""
        slice_S = self.chunk.own.gradient_S
        piece = None if slice_S is None else self.piece_in(slice_S)
        if piece is not None:
            piece.zero_()
        self.is_zero = True


def record_of(parameter: torch.Tensor) -> ManagedParameter | None:
    """Return the record of a managed parameter, None for any other tensor."""
    return getattr(parameter, ATTRIBUTE, None)


def local_part(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the values on this rank."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's strides if they fill memory without holes, else contiguous ones.

    Keeps channels-last and transposed weights as they are.
    """
    expected = 1
    for size, stride in sorted(
        zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: (pair[1], pair[0])
    ):
        if size == 1:
            continue
        if stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()
