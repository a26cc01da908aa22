"""``MemStats``: which parameters a step uses when.

A *step* here is one operator that takes parameters, in forward and again in backward: the words of
that library. The engine plans with a trace of chunks of its own; these statistics are for who looks
at them, and for the order in which ``search_chunk_configuration`` fills chunks. They keep no
parameter alive: through it they would keep all chunks of its model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.errors import ShardwiseError, mismatch

if TYPE_CHECKING:
    from collections.abc import Iterator, MutableMapping, Sequence

    from torch import nn


class OrderedParamGenerator:
    """Parameters in order of their first visit.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> order = OrderedParamGenerator()
        >>> for parameter in (model.bias, model.weight, model.bias):
        ...     order.append(parameter)
        >>> [tuple(parameter.shape) for parameter in order.generate()]
        [(1,), (1, 2)]
    """

    def __init__(self) -> None:
        """Have seen nothing."""
        self._seen: MutableMapping[nn.Parameter, None] = WeakTensorKeyDictionary()

    def append(self, param: nn.Parameter) -> None:
        """Visit a parameter."""
        self._seen.setdefault(param, None)

    def generate(self) -> Iterator[nn.Parameter]:
        """Yield each parameter once."""
        yield from self._seen

    def is_empty(self) -> bool:
        """Return whether nothing was visited."""
        return not len(self._seen)

    def clear(self) -> None:
        """Forget all visits."""
        self._seen.clear()


class MemStats:
    """What one forward and backward pass used, step by step.

    Bytes are those of torch's allocator on the accelerator; without one they are 0.
    """

    def __init__(self) -> None:
        """Have seen nothing."""
        self._order = OrderedParamGenerator()
        self._steps_of: MutableMapping[nn.Parameter, list[int]] = WeakTensorKeyDictionary()
        self._non_model_bytes: list[int] = []
        self._overall_bytes: list[int] = []

    @property
    def num_steps(self) -> int:
        """Number of operators that took parameters, forward and backward."""
        return len(self._non_model_bytes)

    @property
    def max_overall_cuda(self) -> int:
        """The most bytes of the accelerator at any step."""
        return max(self._overall_bytes, default=0)

    def param_order(self) -> list[nn.Parameter]:
        """Return the parameters in order of first use.

        Raises:
            ShardwiseError: Nothing was recorded yet.
        """
        if self._order.is_empty():
            raise ShardwiseError(
                mismatch(
                    "MemStats.param_order",
                    expected="statistics of a pass",
                    got="none yet",
                    fix="run forward and backward through a RuntimeMemTracer first",
                )
            )
        return list(self._order.generate())

    def param_used_step(self, param: nn.Parameter) -> list[int] | None:
        """Return the steps that a parameter is used at; None if it is not."""
        return self._steps_of.get(param)

    def non_model_data_list(self, device_type: str) -> list[int]:
        """Return bytes of activations and all else that is no parameter, by step."""
        return list(self._non_model_bytes) if device_type == "cuda" else [0] * self.num_steps

    def max_non_model_data(self, device_type: str) -> int:
        """Return the most of these bytes at any step."""
        return max(self.non_model_data_list(device_type), default=0)

    def increase_preop_step(
        self, param_list: Sequence[nn.Parameter], *, overall_bytes: int = 0, model_bytes: int = 0
    ) -> None:
        """Record one step.

        Args:
            param_list: What it uses.
            overall_bytes: All bytes of the accelerator.
            model_bytes: Those of them that belong to parameters.
        """
        for parameter in param_list:
            self._order.append(parameter)
            steps = self._steps_of.setdefault(parameter, [])
            if not steps or steps[-1] != self.num_steps:
                steps.append(self.num_steps)
        self._non_model_bytes.append(max(0, overall_bytes - model_bytes))
        self._overall_bytes.append(overall_bytes)

    def clear(self) -> None:
        """Forget everything."""
        self._order.clear()
        self._steps_of.clear()
        self._non_model_bytes.clear()
        self._overall_bytes.clear()
