"""The random number generators of one rank: torch's, its device's, Python's and numpy's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators, as numbers and tensors."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, [int(key) for key in keys], int(position), int(has_gauss), gauss),
    }
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state()
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Continue from a state; one of another kind of device is left aside."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"])
