"""What is known of the optimizers of torch."""

from __future__ import annotations

import torch

STATE_PER_PARAMETER: frozenset[type[torch.optim.Optimizer]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adafactor,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.Muon,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Updates of one parameter depend on no other: they may run chunk by chunk."""

ELEMENT_WISE: frozenset[type[torch.optim.Optimizer]] = STATE_PER_PARAMETER - {
    torch.optim.Adafactor,
    torch.optim.Muon,
}
"""Updates of one element depend on no other: they may run tile by tile."""
