"""``search_chunk_configuration`` and ``init_chunk_manager``: the chunk size that wastes least.

Sizes that are said to be bytes are bytes of the module's parameters, as it is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardwise.compat.colossalai.chunk_manager import ChunkManager
from shardwise.compat.colossalai.data_parallel import IGNORED
from shardwise.errors import ConfigurationError, mismatch
from shardwise.layout import search_chunk_size
from shardwise.runtime.managed import local_part
from shardwise.runtime.materialise import device_for
from shardwise.runtime.topology import launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn

    from shardwise.compat.colossalai.memory_tracer import MemStats

MEBIBYTE = 2**20
DEFAULT_INTERVAL_BYTES = 1024


def search_chunk_configuration(  # noqa: PLR0913 - the signature that scripts were written for
    model: nn.Module,
    search_range_mb: float,
    search_interval_byte: int,
    min_chunk_size_mb: float = 32,
    filter_exlarge_params: bool = True,
    strict_ddp_flag: bool = False,
    memstats: MemStats | None = None,
    *,
    process_group: dist.ProcessGroup | None = None,
) -> tuple[dict[int, dict[str, Any]], int]:
    """Return chunk settings for ``ChunkManager``, and the elements that chunks leave unused.

    A model below ``min_chunk_size_mb`` gets one chunk of exactly its size, which stays gathered.

    Args:
        model: Not sharded yet; parameters of ``set_params_to_ignore`` are skipped.
        search_range_mb: MiB above the smallest size that are searched.
        search_interval_byte: Bytes between the sizes that are tried.
        min_chunk_size_mb: MiB of the smallest size.
        filter_exlarge_params: Leave parameters out that are three standard deviations larger than
            the mean: they get chunks of their own.
        strict_ddp_flag: Without effect: a parameter is shared by all ranks that train together.
        memstats: Fill chunks in the order in which its trace has used the parameters.
        process_group: Ranks that train together; default all.

    Returns:
        ``({number of ranks: {"chunk_size": elements, "keep_gathered": bool}}, waste)``.

    Raises:
        ConfigurationError: A size of no elements, or a model without parameters.

    Example:
        >>> from torch import nn
        >>> search_chunk_configuration(nn.Linear(8, 8), 1, 64, min_chunk_size_mb=0)
        ({1: {'chunk_size': 80, 'keep_gathered': False}}, 8)
    """
    parameters = _in_order(model, memstats)
    numels = [local_part(p).numel() for p in parameters]
    itemsize = max((p.dtype.itemsize for p in parameters), default=1)
    interval_numel = search_interval_byte // itemsize
    range_numel = int(search_range_mb * MEBIBYTE) // itemsize
    least_numel = int(min_chunk_size_mb * MEBIBYTE) // itemsize
    if not sum(numels) or interval_numel < 1 or range_numel < 0 or least_numel < 0:
        raise ConfigurationError(
            mismatch(
                "search_chunk_configuration",
                expected="a model with parameters, a range, and an interval of an element or more",
                got=f"{sum(numels)} elements of {itemsize} bytes, {search_range_mb} MiB, "
                f"{search_interval_byte} bytes and {min_chunk_size_mb} MiB",
                fix="pass the size of a hidden state as interval",
            )
        )
    num_ranks = num_ranks_of(model, process_group)
    if sum(numels) < least_numel:
        return {num_ranks: {"chunk_size": sum(numels), "keep_gathered": True}}, 0
    chunk_numel, waste_numel = search_chunk_size(
        {num_ranks: numels},
        interval_numel=interval_numel,
        range_numel=range_numel,
        min_chunk_numel=least_numel,
        filter_exlarge=filter_exlarge_params,
        multiple_numel=num_ranks,
    )
    return {num_ranks: {"chunk_size": chunk_numel, "keep_gathered": False}}, waste_numel


def init_chunk_manager(
    model: nn.Module,
    init_device: torch.device | None = None,
    hidden_dim: int | None = None,
    **kwargs: Any,  # noqa: ANN401 - arguments of search_chunk_configuration
) -> ChunkManager:
    """Search chunk settings and return the manager with them.

    Args:
        model: As in ``search_chunk_configuration``.
        init_device: As in ``ChunkManager``.
        hidden_dim: Elements of a hidden state: the interval of the search. Default 1 KiB.
        kwargs: Further arguments of ``search_chunk_configuration``; ``search_range_mb`` is 32 if
            left out.

    Example:
        >>> from torch import nn
        >>> manager = init_chunk_manager(nn.Linear(8, 8), min_chunk_size_mb=0)
        >>> manager.settings_for(1).chunk_numel
        256
    """
    first = next(model.parameters(), None)
    itemsize = 1 if first is None else first.dtype.itemsize
    interval_bytes = DEFAULT_INTERVAL_BYTES if hidden_dim is None else hidden_dim * itemsize
    arguments: dict[str, Any] = {
        "search_range_mb": 32,
        "search_interval_byte": interval_bytes,
        **kwargs,
    }
    configuration, _ = search_chunk_configuration(model, **arguments)
    return ChunkManager(configuration, init_device)


def _in_order(model: nn.Module, memstats: MemStats | None) -> Sequence[nn.Parameter]:
    """Return the parameters that are packed: in order of use as far as that is known."""
    own = {p: None for p in model.parameters() if not getattr(p, IGNORED, False)}
    used = [] if memstats is None else [p for p in memstats.param_order() if p in own]
    return list(dict.fromkeys([*used, *own]))


def num_ranks_of(model: nn.Module, group: dist.ProcessGroup | None) -> int:
    """Return how many ranks train a module together."""
    launch(device_for(model, None))
    return dist.get_world_size(group) if dist.is_initialized() else 1
