"""What `ShardedOptimizer` cannot work with is refused by name, in the house form."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw


def _optimizer(**options: Any) -> sw.ShardedOptimizer:
    model = sw.shard(nn.Linear(3, 2), stage=2)
    return sw.ShardedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)


@pytest.mark.parametrize("limit", ["1", True, 0, -1.0, float("nan"), torch.ones(2)], ids=repr)
def test_a_clipping_limit_that_is_no_positive_number_is_refused(limit: object) -> None:
    with pytest.raises(sw.ConfigurationError, match="clip_grad_norm expected a positive number"):
        _optimizer(clip_grad_norm=limit)


@pytest.mark.parametrize("limit", [1, 0.5, torch.tensor(2.0)], ids=repr)
def test_a_clipping_limit_may_be_any_kind_of_number(limit: object) -> None:
    assert _optimizer(clip_grad_norm=limit).clip_grad_norm_(limit).item() == 0.0


@pytest.mark.parametrize(
    "group", [3, None, [nn.Parameter(torch.ones(2))]], ids=["3", "None", "list"]
)
def test_a_group_that_is_no_dict_is_refused(group: object) -> None:
    with pytest.raises(sw.ConfigurationError, match="add_param_group expected a dict"):
        _optimizer().add_param_group(group)


def test_a_group_of_other_things_than_parameters_is_refused() -> None:
    with pytest.raises(sw.ConfigurationError, match=r"add_param_group expected nn\.Parameter"):
        _optimizer().add_param_group({"params": [3]})


@pytest.mark.parametrize("state", [None, 3, []], ids=repr)
def test_a_state_that_is_no_dict_is_refused(state: object) -> None:
    with pytest.raises(sw.ConfigurationError, match="load_state_dict expected a dict"):
        _optimizer().load_state_dict(state)


@pytest.mark.parametrize("take", [pickle.dumps, copy.deepcopy, copy.copy], ids=lambda f: f.__name__)
def test_a_copy_is_refused(take: Any) -> None:
    with pytest.raises(sw.ShardwiseError, match="expected a plain optimizer"):
        take(_optimizer())
