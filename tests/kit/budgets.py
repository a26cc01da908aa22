"""Find the smallest budgets that work, by what refusals say."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import shardwise as sw
from tests.kit.sharded import build, run_step

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from torch import nn

    from tests.kit.models import Case
    from tests.kit.sharded import Setting


def with_budget(setting: Setting, **budget: Any) -> Setting:
    """Return a setting that trains within a budget."""
    offload = sw.AdaptiveOffload(sw.Budget(**budget))
    return replace(setting, options=setting.options | {"offload": offload})


def asked_bytes(error: sw.BudgetError, tier: str) -> int:
    """Return the bytes of a tier that an error says would do."""
    found = re.search(rf"Budget\.{tier} to (\d+) bytes", str(error))
    assert found is not None, error
    return int(found[1])


def smallest(
    tier: str,
    case: Case,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    setting: Setting,
    **budget: Any,
) -> int:
    """Return the least bytes in a tier with which two steps can be trained."""
    limit_bytes = 1
    for _ in range(5):
        limited = with_budget(setting, **{**budget, tier: limit_bytes})
        try:
            model, optimizer = build(case, make_optimizer, limited)
            for step in range(2):
                run_step(model, optimizer, case, limited, step)
        except sw.BudgetError as error:
            limit_bytes = asked_bytes(error, tier)
        else:
            return limit_bytes
    raise AssertionError("what a refusal asks for does not do")
