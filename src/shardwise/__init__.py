"""Train PyTorch models that do not fit: training state sharded over the data-parallel ranks.

The loop, the numbers and the checkpoints stay those of plain PyTorch::

    sw.shard(model)
    optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), lr=3e-4))
    for batch in loader:
        optimizer.backward(model(batch))
        optimizer.step()
        optimizer.zero_grad()
"""

from __future__ import annotations

from shardwise.checkpoint import export, latest, load, save
from shardwise.errors import (
    BudgetError,
    CheckpointError,
    ConfigurationError,
    DivergenceError,
    LayoutError,
    ShardwiseError,
)
from shardwise.optimizer import ShardedOptimizer
from shardwise.options import AdaptiveOffload, Budget, LossScale, MixedPrecision, StaticOffload
from shardwise.report import memory_report
from shardwise.shard import full_gradient, full_parameters, no_sync, shard

__version__ = "0.1.0"

__all__ = [
    "AdaptiveOffload",
    "Budget",
    "BudgetError",
    "CheckpointError",
    "ConfigurationError",
    "DivergenceError",
    "LayoutError",
    "LossScale",
    "MixedPrecision",
    "ShardedOptimizer",
    "ShardwiseError",
    "StaticOffload",
    "export",
    "full_gradient",
    "full_parameters",
    "latest",
    "load",
    "memory_report",
    "no_sync",
    "save",
    "shard",
]
