"""The data-parallel classes of ColossalAI over this engine.

A script keeps its calls and changes one line::

    from shardwise.compat.colossalai import LowLevelZeroOptimizer

Signatures, defaults and what a call leaves behind are those of that library; numbers, errors and
memory are those of this one. New code is better served by ``shardwise.shard`` and
``shardwise.ShardedOptimizer``.
"""

from __future__ import annotations

from shardwise.compat.colossalai.data_parallel import ColoDDP
from shardwise.compat.colossalai.low_level_zero import LowLevelZeroOptimizer
from shardwise.compat.colossalai.reducer import Reducer
from shardwise.compat.colossalai.static_model import get_static_torch_model
from shardwise.compat.colossalai.zero_ddp import ZeroDDP

__all__ = ["ColoDDP", "LowLevelZeroOptimizer", "Reducer", "ZeroDDP", "get_static_torch_model"]
