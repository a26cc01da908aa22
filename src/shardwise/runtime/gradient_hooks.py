"""Hooks on the nodes that accumulate gradients; what they do is the reducer's matter."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from shardwise.runtime.absent import describing
from shardwise.runtime.chunk import Presence
from shardwise.runtime.placeholder import ShardedGradient

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from shardwise.runtime.managed import ManagedParameter

RELEASABLE = 0
"""In place of the storage of a parameter whose storage comes and goes."""


class GradientHooks:
    """Calls back around the accumulation of every trainable parameter's gradient."""

    def __init__(
        self,
        before: Callable[[ManagedParameter, object], None],
        after: Callable[[ManagedParameter, torch.Tensor], None],
    ) -> None:
        """Call ``before`` with room to clear ``parameter.grad``, ``after`` when it is there."""
        self._before, self._after = before, after
        self._hooks: dict[ManagedParameter, list[torch.utils.hooks.RemovableHandle]] = {}
        self._nodes: dict[ManagedParameter, tuple[torch.autograd.graph.Node, int]] = {}

    @describing
    def watch(self, records: Iterable[ManagedParameter]) -> list[ManagedParameter]:
        """Hook those that are trainable and have no hooks, or lost one to new ``.data``."""
        fresh: list[ManagedParameter] = []
        for record in records:
            is_known = record in self._hooks
            is_resident = record.chunk.presence is Presence.RESIDENT
            if not record.parameter.requires_grad:
                continue
            if is_known and record.chunk.pending and is_resident:
                continue
            storage = record.values.untyped_storage()._cdata if is_resident else RELEASABLE
            if is_known and self._nodes[record][1] == storage:
                continue
            for hook in self._hooks.pop(record, ()):
                hook.remove()
            self._hook(record, storage)
            fresh.append(record)
        return fresh

    def forget(self, record: ManagedParameter) -> None:
        """Hook a parameter anew at the next ``watch``: new ``.data`` may have cost its node."""
        for hook in self._hooks.pop(record, ()):
            hook.remove()

    def close(self) -> None:
        """Let go of parameters: nodes that own them are hidden from Python."""
        for hooks in self._hooks.values():
            for hook in hooks:
                hook.remove()
        self._hooks.clear()
        self._nodes.clear()

    def _hook(self, record: ManagedParameter, storage: int) -> None:
        """Hook the node that accumulates into one parameter's gradient."""
        before = record.num_uses
        with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
            alias = record.parameter.view_as(record.parameter).grad_fn
        assert alias is not None
        node = alias.next_functions[0][0]
        assert node is not None
        del alias
        record.idle_uses += record.num_uses - before
        record.handle = ShardedGradient(record)
        record.chunk.own.ensure_master()
        self._nodes[record] = (node, storage)  # the tensor holds its node weakly
        self._hooks[record] = [
            node.register_prehook(partial(self._before, record)),
            record.parameter.register_post_accumulate_grad_hook(partial(self._after, record)),
        ]
