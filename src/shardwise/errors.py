"""Every error that shardwise raises on purpose; it does not decide when.

::

    ShardwiseError (RuntimeError)          misuse: the state is as it was before the call
      ConfigurationError (ValueError)      an argument, or a combination of them, that cannot work
      LayoutError (ValueError)             sizes that cannot be packed into chunks and slices
      BudgetError (MemoryError)            bytes that do not fit into a tier: nothing was changed
      CheckpointError                      a checkpoint that cannot be written, read or trusted
      DivergenceError                      ranks that went different ways and no longer meet

A message reads ``<what> expected <X> but got <Y> (<where>); <what to do next>.``
"""

from __future__ import annotations


class ShardwiseError(RuntimeError):
    """A mistake that shardwise refuses before it changes any state."""


class ConfigurationError(ShardwiseError, ValueError):
    """An argument, or a combination of arguments, that cannot work."""


class LayoutError(ShardwiseError, ValueError):
    """Sizes that cannot be packed into chunks and slices."""


class BudgetError(ShardwiseError, MemoryError):
    """More bytes than a tier may hold: raised before anything changes."""


class CheckpointError(ShardwiseError):
    """A checkpoint that cannot be written, that is damaged, or that does not fit the model."""


class DivergenceError(ShardwiseError):
    """Ranks went different ways: raised where a communication failed, naming each rank's place."""


def mismatch(what: str, *, expected: object, got: object, fix: str, where: str = "") -> str:
    """Return the one sentence in which every error of the library is phrased."""
    place = f" ({where})" if where else ""
    return f"{what} expected {expected} but got {got}{place}; {fix}."
