"""Dynamic loss scaling as a small state machine; it never touches a tensor.

Source: Micikevicius et al., Mixed Precision Training, 2018; the hysteresis is that of Apex and
ColossalAI, where a good step does not reset it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from shardwise.options import LossScale


class LossScaler:
    """The current scale and the two counters that move it.

    Example:
        >>> scaler = LossScaler(LossScale(initial_scale=16.0, growth_interval=1))
        >>> scaler.update(overflowed=False)
        >>> scaler.scale
        32.0
    """

    def __init__(self, options: LossScale) -> None:
        """Start at the initial scale."""
        self.options = options
        self.scale = options.initial_scale
        self._num_good_steps = 0
        self._num_overflows = 0

    def update(self, *, overflowed: bool) -> None:
        """Count one step and move the scale."""
        options = self.options
        if overflowed:
            self._num_good_steps = 0
            self._num_overflows += 1
            if self._num_overflows >= options.hysteresis:
                self.scale = max(self.scale * options.backoff_factor, options.min_scale)
            return
        self._num_good_steps += 1
        if self._num_good_steps == options.growth_interval:
            self._num_good_steps = 0
            self._num_overflows = 0
            self.scale = min(self.scale * options.growth_factor, options.max_scale)

    def state_dict(self) -> dict[str, float | int]:
        """Return the scale and both counters."""
        return {
            "scale": self.scale,
            "num_good_steps": self._num_good_steps,
            "num_overflows": self._num_overflows,
        }

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Continue from a state that ``state_dict`` returned."""
        self.scale = float(state["scale"])
        self._num_good_steps = int(state["num_good_steps"])
        self._num_overflows = int(state["num_overflows"])
