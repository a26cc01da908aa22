"""What `shard` and its companions cannot work with is refused by name, in the house form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

import shardwise as sw

if TYPE_CHECKING:
    from collections.abc import Callable


def _sharded() -> nn.Module:
    return sw.shard(nn.Sequential(nn.Linear(3, 2)), stage=2)


def _optimizer() -> sw.ShardedOptimizer:
    return sw.ShardedOptimizer(torch.optim.SGD(_sharded().parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"units": nn.Linear}, r"units expected an iterable of module classes but got Linear"),
        ({"units": 3}, r"units expected an iterable of module classes but got int"),
        ({"ignored": None}, r"ignored expected an iterable of parameters but got NoneType"),
        ({"ignored": nn.Parameter(torch.ones(2))}, r"ignored expected .* but got Parameter"),
        ({"ignored": ["0.weight"]}, r"ignored expected parameters .* but got 1 other objects"),
        ({"ignored": [[]]}, r"ignored expected parameters .* but got 1 other objects"),
        ({"init_fn": 3}, r"init_fn expected a function of a module, or None but got 3"),
    ],
    ids=["units-class", "units-int", "ignored-none", "ignored-one", "ignored-name", "list", "init"],
)
def test_shard_refuses_arguments_of_the_wrong_kind(options: dict[str, Any], message: str) -> None:
    with pytest.raises(sw.ConfigurationError, match=message):
        sw.shard(nn.Sequential(nn.Linear(3, 2)), **options)


@pytest.mark.parametrize("enter", [sw.no_sync, sw.full_parameters], ids=lambda e: e.__name__)
@pytest.mark.parametrize(
    "make",
    [_optimizer, lambda: None, lambda: _sharded()[0].weight, lambda: nn.Linear(2, 2)],
    ids=["optimizer", "none", "parameter", "plain-module"],
)
def test_contexts_of_a_module_refuse_anything_else(
    enter: Callable[[Any], Any], make: Callable[[], object]
) -> None:
    with (
        pytest.raises(sw.ConfigurationError, match=r"module expected one that shardwise\.shard"),
        enter(make()),
    ):
        pass


@pytest.mark.parametrize("given", ["a", None, 3], ids=repr)
def test_full_gradient_refuses_what_is_no_parameter(given: object) -> None:
    with pytest.raises(sw.ConfigurationError, match="full_gradient expected a parameter"):
        sw.full_gradient(given)
