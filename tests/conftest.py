"""Fixtures and plugins of the whole suite."""

from __future__ import annotations

import pytest
import torch

pytest_plugins = ["tests.kit.world_size"]


def pytest_configure(config: pytest.Config) -> None:
    """Keep every test process to one thread: the ranks of a test share the machine."""
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what needs an accelerator where there is none."""
    if torch.accelerator.is_available():
        return
    for item in items:
        if item.get_closest_marker("accelerator"):
            item.add_marker(pytest.mark.skip(reason="needs an accelerator, torch sees none"))


@pytest.fixture(autouse=True)
def _deterministic_seed() -> None:
    torch.manual_seed(0)
