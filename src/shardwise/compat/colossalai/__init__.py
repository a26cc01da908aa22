"""The data-parallel classes of ColossalAI over this engine.

A script keeps its calls and changes one line::

    from shardwise.compat.colossalai import LowLevelZeroOptimizer

Signatures, defaults and what a call leaves behind are those of that library; numbers, errors and
memory are those of this one. New code is better served by ``shardwise.shard`` and
``shardwise.ShardedOptimizer``.
"""

from __future__ import annotations

from shardwise.compat.colossalai.adam import CPUAdam, FusedAdam, HybridAdam
from shardwise.compat.colossalai.chunk_manager import ChunkManager
from shardwise.compat.colossalai.chunk_search import init_chunk_manager, search_chunk_configuration
from shardwise.compat.colossalai.data_parallel import ColoDDP
from shardwise.compat.colossalai.gemini_ddp import GeminiDDP
from shardwise.compat.colossalai.gemini_manager import GeminiManager
from shardwise.compat.colossalai.low_level_zero import LowLevelZeroOptimizer
from shardwise.compat.colossalai.memory_tracer import RuntimeMemTracer
from shardwise.compat.colossalai.memstats import MemStats, OrderedParamGenerator
from shardwise.compat.colossalai.policies import (
    AutoPlacementPolicy,
    ConstPlacementPolicy,
    PlacementPolicyFactory,
)
from shardwise.compat.colossalai.reducer import Reducer
from shardwise.compat.colossalai.static_model import get_static_torch_model
from shardwise.compat.colossalai.zero_ddp import ZeroDDP
from shardwise.compat.colossalai.zero_optimizer import GeminiAdamOptimizer, ZeroOptimizer

__all__ = [
    "AutoPlacementPolicy",
    "CPUAdam",
    "ChunkManager",
    "ColoDDP",
    "ConstPlacementPolicy",
    "FusedAdam",
    "GeminiAdamOptimizer",
    "GeminiDDP",
    "GeminiManager",
    "HybridAdam",
    "LowLevelZeroOptimizer",
    "MemStats",
    "OrderedParamGenerator",
    "PlacementPolicyFactory",
    "Reducer",
    "RuntimeMemTracer",
    "ZeroDDP",
    "ZeroOptimizer",
    "get_static_torch_model",
    "init_chunk_manager",
    "search_chunk_configuration",
]
