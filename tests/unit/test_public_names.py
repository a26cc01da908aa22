"""The public names: whoever adds or removes one does it here on purpose."""

from __future__ import annotations

import shardwise

PUBLIC_NAMES = [
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


def test_all_is_exactly_the_public_names():
    assert list(shardwise.__all__) == PUBLIC_NAMES


def test_every_public_name_is_there_and_says_what_it_does():
    for name in PUBLIC_NAMES:
        assert getattr(shardwise, name).__doc__, name


def test_the_version_is_that_of_the_distribution():
    assert isinstance(shardwise.__version__, str)
    assert shardwise.__version__[0].isdigit()
