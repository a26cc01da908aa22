"""``ShardedOptimizer``: any ``torch.optim`` optimizer over the pieces that this rank owns."""

from shardwise.optimizer.sharded import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
