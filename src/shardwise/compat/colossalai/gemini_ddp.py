"""``GeminiDDP``: search, managers and ``ZeroDDP`` in one call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardwise.compat.colossalai.chunk_search import init_chunk_manager
from shardwise.compat.colossalai.gemini_manager import GeminiManager
from shardwise.compat.colossalai.zero_ddp import ZeroDDP

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwise.compat.colossalai.memory_tracer import MemStats


class GeminiDDP(ZeroDDP):
    """A ``ZeroDDP`` that searches its own chunk size.

    Args:
        module: As in ``ZeroDDP``.
        device: Where it computes: the module is moved there first. None leaves it where it is.
        placement_policy: As in ``GeminiManager``.
        pin_memory: As in ``ZeroDDP``.
        force_outputs_fp32: As in ``ZeroDDP``.
        strict_ddp_mode: As in ``ZeroDDP``.
        search_range_mb: As in ``search_chunk_configuration``; None is 32.
        hidden_dim: As in ``init_chunk_manager``.
        min_chunk_size_mb: As in ``search_chunk_configuration``; None is 32.
        memstats: Order in which chunks are filled; see also ``GeminiManager``.
        settings: Further arguments of ``ZeroDDP`` by name.

    Raises:
        ConfigurationError: Before the module is changed.

    Collectives: as ``ZeroDDP``.

    Example:
        >>> model = GeminiDDP(nn.Linear(4, 2), placement_policy="cuda", min_chunk_size_mb=0)
        >>> model.gemini_manager.policy_name
        'cuda'
    """

    def __init__(  # noqa: PLR0913 - the signature that scripts were written for
        self,
        module: nn.Module,
        device: torch.device | None = None,
        placement_policy: str = "cpu",
        pin_memory: bool = False,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        search_range_mb: float | None = 32,
        hidden_dim: int | None = None,
        min_chunk_size_mb: float | None = None,
        memstats: MemStats | None = None,
        **settings: Any,  # noqa: ANN401 - arguments of ZeroDDP
    ) -> None:
        chunk_manager = init_chunk_manager(
            module,
            device,
            hidden_dim,
            search_range_mb=32 if search_range_mb is None else search_range_mb,
            min_chunk_size_mb=32 if min_chunk_size_mb is None else min_chunk_size_mb,
            strict_ddp_flag=strict_ddp_mode,
            memstats=memstats,
            process_group=settings.get("process_group"),
        )
        manager = GeminiManager(placement_policy, chunk_manager, memstats)
        if device is not None:
            module.to(device)
        super().__init__(
            module, manager, pin_memory, force_outputs_fp32, strict_ddp_mode, **settings
        )
