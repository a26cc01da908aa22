"""``HybridAdam``, ``CPUAdam`` and ``FusedAdam``: Adam of torch under their argument names.

Where a piece of a parameter is updated is no matter of the class: the update runs where its state
lies, on the accelerator, on the host, or from disk chunk by chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.errors import ConfigurationError, mismatch

if TYPE_CHECKING:
    from collections.abc import Iterable


class HybridAdam(torch.optim.Adam):
    """Adam, or AdamW by default, with one fused call for all pieces of a chunk.

    Every parameter counts its own updates, so that one which is updated less often is corrected
    rightly for it.

    Args:
        model_params: Parameters, or groups of them.
        lr: Step size.
        bias_correction: True: torch has no other.
        betas: Decay of the two moments.
        eps: Added to the root of the second.
        weight_decay: Of the weights themselves, or, without ``adamw_mode``, of the loss.
        adamw_mode: See ``weight_decay``.
        nvme_offload_fraction: 0: which bytes rest on disk is chosen where the model is sharded.
        nvme_offload_dir: None.
        defaults: Further options of ``torch.optim.Adam``.

    Raises:
        ConfigurationError: An option that would be dropped in silence.

    Example:
        >>> model = torch.nn.Linear(2, 1)
        >>> HybridAdam(model.parameters(), lr=0.1).defaults["decoupled_weight_decay"]
        True
    """

    def __init__(  # noqa: PLR0913 - the signature that scripts were written for
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        **defaults: Any,  # noqa: ANN401 - options of torch's
    ) -> None:
        _check(bias_correction=bias_correction, nvme_fraction=nvme_offload_fraction)
        options: dict[str, Any] = {
            "fused": True,
            "decoupled_weight_decay": adamw_mode,
            **defaults,
        }
        super().__init__(
            model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **options
        )


class CPUAdam(torch.optim.Adam):
    """As ``HybridAdam``: also for parameters on an accelerator.

    Example:
        >>> CPUAdam(torch.nn.Linear(2, 1).parameters(), lr=0.5).defaults["lr"]
        0.5
    """

    def __init__(  # noqa: PLR0913 - the signature that scripts were written for
        self,
        model_params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
    ) -> None:
        _check(bias_correction=bias_correction, nvme_fraction=nvme_offload_fraction)
        options: dict[str, Any] = {"fused": True, "decoupled_weight_decay": adamw_mode}
        super().__init__(
            model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, **options
        )


class FusedAdam(torch.optim.Adam):
    """As ``HybridAdam``, with the arguments of the fused class; ``amsgrad`` works, too.

    Example:
        >>> FusedAdam(torch.nn.Linear(2, 1).parameters(), adam_w_mode=False).defaults["fused"]
        True
    """

    def __init__(  # noqa: PLR0913 - the signature that scripts were written for
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ) -> None:
        _check(bias_correction=bias_correction, nvme_fraction=0)
        options: dict[str, Any] = {"fused": True, "decoupled_weight_decay": adam_w_mode}
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            **options,
        )


def _check(*, bias_correction: bool, nvme_fraction: float) -> None:
    """Refuse options that would be dropped in silence."""
    if not bias_correction:
        raise ConfigurationError(
            mismatch(
                "bias_correction",
                expected=True,
                got=bias_correction,
                fix="drop it: torch's Adam corrects the bias of its moments",
            )
        )
    if nvme_fraction != 0:
        raise ConfigurationError(
            mismatch(
                "nvme_offload_fraction",
                expected="0",
                got=nvme_fraction,
                fix="choose it where the model is sharded: pass ZeroDDP "
                'offload=StaticOffload(optimizer=fraction, to="disk", disk_path=...)',
            )
        )
