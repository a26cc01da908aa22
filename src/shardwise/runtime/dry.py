"""Dry runs: the engine under torch's ``FakeTensorMode``, where tensors have shapes and no values.

Everything that ranks would tell each other is then taken to be what this rank says.
"""

from __future__ import annotations

import torch


def is_dry_run() -> bool:
    """Return whether tensors that are made now have no values."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
