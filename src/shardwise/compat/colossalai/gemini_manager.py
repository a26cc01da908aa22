"""``GeminiManager``: a placement policy and chunk sizes, as arguments of ``shardwise.shard``.

It moves nothing while a model trains. For policies that look ahead it records the first pass, for
who wants to read which parameters were used when.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from shardwise.compat.colossalai.memory_tracer import UseRecorder
from shardwise.compat.colossalai.policies import PlacementPolicyFactory, make_policy
from shardwise.errors import ConfigurationError, mismatch
from shardwise.options import StaticOffload
from shardwise.runtime.topology import PARAMETER_STAGE

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from torch import nn

    from shardwise.compat.colossalai.chunk_manager import ChunkManager
    from shardwise.compat.colossalai.memory_tracer import MemStats
    from shardwise.options import AdaptiveOffload, Budget
    from shardwise.runtime.engine import Engine

GRADIENT_STAGE = 2
"""The stage that shards gradients and optimizer state, but no parameters."""
LOOKING_AHEAD = ("auto", "const")
"""Policies that decide by next uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Arguments of ``shardwise.shard``."""

    stage: int
    offload: StaticOffload | AdaptiveOffload | None = None
    chunk_bytes: int | None = None
    reshard_after_forward: bool | int = True


class GeminiManager:
    """Decides where parameters, gradients and optimizer state of one ``ZeroDDP`` rest.

    ======  ==================================================================================
    cuda    nothing moves, and what is gathered in forward stays until it is updated
    cpu     everything in host memory; no more is gathered than is in use or coming next
    const   as cpu, and 512 MiB of gathered chunks stay (``ConstPlacementPolicy``)
    auto    what fits into 90% of the accelerator stays there, the rest in host memory
            (``AutoPlacementPolicy``, or ``budget``)
    static  fractions
    ======  ==================================================================================

    Args:
        placement_policy: One of these names.
        chunk_manager: Chunk sizes.
        memstats: Statistics recorded before, which ``memstats`` then returns; no warm-up is
            recorded. Where bytes rest does not depend on them: the engine measures its first step.
        shard_param_frac: "static": fraction of the bytes of chunks that are let go after their use.
            Zeros everywhere are ZeRO-2; 1, the default, is ZeRO-3.
        offload_optim_frac: "static": fraction of the bytes of masters, optimizer state and
            gradients in host memory. Default 0.
        offload_param_frac: "static": fraction of the bytes of parameters in host memory; it takes
            effect whatever the others are. Default 0.
        budget: "auto": bytes that a rank may hold in each tier. Default: the share above of the
            accelerator; no limit where there is none.

    Raises:
        ConfigurationError: An unknown policy, or settings of another one.

    Example:
        >>> from shardwise.compat.colossalai import ChunkManager, ZeroDDP
        >>> chunks = ChunkManager({1: {"chunk_size": 64, "keep_gathered": False}})
        >>> model = ZeroDDP(nn.Linear(4, 2), GeminiManager("cpu", chunks))
        >>> chunks.total_mem["cuda"], chunks.total_mem["cpu"] > 0
        (0, True)
    """

    def __init__(  # noqa: PLR0913 - the signature that scripts were written for
        self,
        placement_policy: str,
        chunk_manager: ChunkManager,
        memstats: MemStats | None = None,
        *,
        shard_param_frac: float | None = None,
        offload_optim_frac: float | None = None,
        offload_param_frac: float | None = None,
        budget: Budget | None = None,
    ) -> None:
        fractions = {
            "shard": shard_param_frac,
            "optimizer": offload_optim_frac,
            "parameters": offload_param_frac,
        }
        self._policy = make_policy(placement_policy, fractions, budget)
        self.chunk_manager = chunk_manager
        self.policy_name = placement_policy
        self._premade = memstats
        self._recorder: UseRecorder | None = None

    @staticmethod
    def get_default_device(policy_name: str) -> torch.device:
        """Return where slices rest by default: the accelerator for "cuda" and "static"."""
        return PlacementPolicyFactory.get_default_device(policy_name)

    # ------------------------------------------------------------------ for ``ZeroDDP``

    def sharding(
        self, parameters: Sequence[nn.Parameter], *, dtype: torch.dtype | None, num_ranks: int
    ) -> Sharding:
        """Return how to shard a module.

        Args:
            parameters: All that are sharded.
            dtype: Of the working parameters; None keeps each one's own.
            num_ranks: That train together.

        Raises:
            ConfigurationError: There are no chunk sizes for these ranks, or the manager is another
                module's.
        """
        if self.chunk_manager.is_in_use:
            raise ConfigurationError(
                mismatch(
                    "gemini_manager",
                    expected="a manager of no other module",
                    got="one that a module has already",
                    fix="make a ChunkManager and a GeminiManager for each module",
                )
            )
        chunks = self.chunk_manager.settings_for(num_ranks)
        itemsizes = [(dtype or p.dtype).itemsize for p in parameters]
        whole_bytes = sum(
            p.numel() * itemsize for p, itemsize in zip(parameters, itemsizes, strict=True)
        )
        preset = self._policy.preset(whole_bytes=whole_bytes)
        chunk_bytes = chunks.chunk_numel * max(itemsizes, default=1)
        if chunks.keep_gathered:
            return self._kept_whole(preset.offload, chunk_bytes)
        keep_bytes = preset.keep_bytes
        return Sharding(
            stage=PARAMETER_STAGE,
            offload=_effective(preset.offload),
            chunk_bytes=chunk_bytes,
            reshard_after_forward=False if keep_bytes is None else (keep_bytes or True),
        )

    def whole(self, sharding: Sharding) -> Sharding:
        """Return how to shard the same module with parameters whole on every rank."""
        return self._kept_whole(sharding.offload, sharding.chunk_bytes)

    def _kept_whole(
        self, offload: StaticOffload | AdaptiveOffload | None, chunk_bytes: int | None
    ) -> Sharding:
        """Return stage 2: parameters, which are whole, cannot rest elsewhere."""
        if isinstance(offload, StaticOffload):
            offload = replace(offload, parameters=0.0)
        return Sharding(stage=GRADIENT_STAGE, offload=_effective(offload), chunk_bytes=chunk_bytes)

    def serve(self, module: nn.Module, engine: Engine) -> None:
        """Watch the first pass of a sharded module where the policy looks ahead."""
        self.chunk_manager.serve(engine)
        if self.need_warmup:
            manager = self.chunk_manager
            self._recorder = UseRecorder(module.parameters(), lambda: manager.total_mem["cuda"])

    @contextmanager
    def watching(self, *, is_backward: bool = False) -> Generator[None]:
        """Record the first pass that trains; its backward ends the warm-up."""
        recorder = self._recorder
        is_training = is_backward or torch.is_grad_enabled()
        if recorder is None or recorder.has_ended or not is_training:
            yield
            return
        with recorder.watching():
            yield
        recorder.has_ended = is_backward

    # ------------------------------------------------------------------ what a user reads

    @property
    def need_warmup(self) -> bool:
        """True where the policy looks ahead and nothing was recorded before."""
        return self._premade is None and self.policy_name in LOOKING_AHEAD

    def is_warmup(self) -> bool:
        """Return whether the first pass is still to come, or under way."""
        if self._recorder is None:
            return self.need_warmup
        return not self._recorder.has_ended

    @property
    def memstats(self) -> MemStats | None:
        """What the first pass used, or the statistics given; None where there are none yet."""
        if self._recorder is None or not self._recorder.has_ended:
            return self._premade
        return self._recorder.memstats


def _effective(
    offload: StaticOffload | AdaptiveOffload | None,
) -> StaticOffload | AdaptiveOffload | None:
    """Return a choice, or None for one that leaves everything where it is."""
    return None if offload == StaticOffload() else offload
