"""``ColoDDP``: data parallelism with whole gradients, for any plain optimizer on top.

Parameters are replicated (stage 0 of the engine); after ``backward`` every ``parameter.grad`` is a
view of the reduced gradients, which further passes add to until ``zero_grad``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.compat.colossalai.groups import mesh_of
from shardwise.errors import ConfigurationError, mismatch
from shardwise.shard import engine_of, shard

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    import torch.distributed as dist

    from shardwise.runtime.managed import ManagedParameter

MEBIBYTE = 2**20
IGNORED = "_ddp_to_ignore"
"""The one attribute that is set on a user's parameter, by ``set_params_to_ignore``."""


class ColoDDP(nn.Module):
    """A module whose gradients are the mean over ranks after ``backward``.

    Names are those of the inner module: ``parameters``, ``named_*``, ``state_dict`` and
    ``load_state_dict`` act on it. The first rank's parameters and buffers are given to all ranks. A
    parameter that no rank used has no gradient; one that some rank used has the mean, with zero for
    the others.

    Args:
        module: Any module that is not sharded yet.
        process_group: Ranks that train together; default all.
        bucket_cap_mb: MiB that are reduced together; a larger parameter goes by itself.
        rebuild_bucket: Without effect: gradients lie in the buffers that were reduced, and
            ``zero_grad(set_to_none=True)`` lets go of them.

    Raises:
        ConfigurationError: Before the module is changed.

    Collectives: a check, a broadcast per chunk and buffer.

    Example:
        >>> model = ColoDDP(nn.Linear(4, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> model.backward(model(torch.ones(1, 4)).sum())
        >>> optimizer.step()
        >>> model.zero_grad()
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        rebuild_bucket: bool = True,
    ) -> None:
        super().__init__()
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        self.module = shard(
            module,
            stage=0,
            mesh=mesh_of(process_group, 1, device),
            chunk_bytes=max(1, int(bucket_cap_mb * MEBIBYTE)),
            ignored=[p for p in module.parameters() if getattr(p, IGNORED, False)],
        )

    @staticmethod
    def set_params_to_ignore(params_to_ignore: Iterable[nn.Parameter]) -> None:
        """Leave parameters alone in modules wrapped from now on: their gradients stay local.

        Raises:
            ConfigurationError: A parameter is in a wrapped module already.
        """
        chosen = list(params_to_ignore)
        for parameter in chosen:
            if getattr(parameter, "_shardwise", None) is not None:
                raise ConfigurationError(
                    mismatch(
                        "set_params_to_ignore",
                        expected="parameters of modules that are not wrapped yet",
                        got=f"one of shape {tuple(parameter.shape)} of a wrapped module",
                        fix="call it before ColoDDP(module)",
                    )
                )
        for parameter in chosen:
            setattr(parameter, IGNORED, True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - that of the module
        """Call the module."""
        return self.module(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients, reduce them and put them into ``parameter.grad``.

        Instead of ``loss.backward()``, which leaves stand-ins there. Gradients that an optimizer or
        the user set to None since the last pass are gone; the others are added to.

        Collectives: a reduction per chunk, begun during the pass, and one agreement.
        """
        engine = engine_of(self.module)
        for record in engine.records:
            _take_back(record)
        engine.reducer.backward(loss.backward)
        for record in engine.records:
            gradient_S = record.chunk.own.gradient_S
            if record.is_held and gradient_S is not None:
                # every rank's slice is the whole chunk
                record.parameter.grad = record.view_in(gradient_S)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Begin a new sum of gradients: forget them, or keep zeros.

        Also recovers from a backward pass that ended in an error.
        """
        engine = engine_of(self.module)
        engine.reducer.reset()
        if set_to_none:
            engine.zero_grad(engine.records, set_to_none=True)
        for parameter in self.module.parameters():
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    # ------------------------------------------------------------------ the inner module's names

    def children(self) -> Iterator[nn.Module]:
        """Yield the inner module: ``train``, ``to`` and ``apply`` reach all of it this way."""
        yield self.module

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the inner module's children."""
        return self.module.named_children()

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Generator[tuple[str, nn.Module], None, None]:
        """Yield the inner module and its parts."""
        yield from self.module.named_modules(memo, prefix, remove_duplicate)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:  # noqa: ANN401
        """Yield the inner module's parameters."""
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:  # noqa: ANN401
        """Yield the inner module's buffers."""
        return self.module.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        """Return the inner module's state."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:  # noqa: ANN401
        """Load the inner module's state."""
        return self.module.load_state_dict(state_dict, strict=strict, assign=assign)


def _take_back(record: ManagedParameter) -> None:
    """Let autograd start a new gradient; the sum so far stays in the chunk, behind the stand-in."""
    grad = record.parameter.grad
    gradient_S = record.chunk.own.gradient_S
    if not record.is_held or gradient_S is None or grad is record.handle:
        return
    if grad is None:
        record.drop_gradient()
        return
    if grad.untyped_storage()._cdata != gradient_S.untyped_storage()._cdata:
        with torch.no_grad():
            record.view_in(gradient_S).copy_(grad)
    record.parameter.grad = record.handle
