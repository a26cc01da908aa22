"""``ZeroDDP``: a module whose parameters, gradients and optimizer state are sharded over ranks.

It is stage 3 of the engine under the constructor and the state dicts that ColossalAI gave it: the
working values are float16 by default, state dicts hold the float32 values behind them.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm

from shardwise.compat.colossalai.chunk_search import num_ranks_of
from shardwise.compat.colossalai.data_parallel import IGNORED, ColoDDP
from shardwise.compat.colossalai.gemini_manager import GRADIENT_STAGE, GeminiManager, Sharding
from shardwise.compat.colossalai.groups import mesh_of
from shardwise.compat.colossalai.settings import rounded
from shardwise.compat.colossalai.whole_model import (
    is_first_rank,
    load_whole_state,
    whole_state,
)
from shardwise.errors import ConfigurationError, ShardwiseError, mismatch
from shardwise.optimizer.arguments import check_loss
from shardwise.options import LossScale, MixedPrecision
from shardwise.runtime.materialise import device_for
from shardwise.runtime.topology import PARAMETER_STAGE
from shardwise.shard import engine_of, shard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from contextlib import AbstractContextManager

    import torch.distributed as dist

    from shardwise.compat.colossalai.chunk_manager import ChunkManager
    from shardwise.options import AdaptiveOffload, StaticOffload


class ZeroDDP(ColoDDP):
    """A module that every rank holds a slice of; its parameters are whole only while it computes.

    Names are those of the inner module. The first rank's parameters and buffers are given to all
    ranks. Floating-point inputs are cast to the working dtype; buffers, and parameters of batch
    norms, keep theirs. Gradients add up over backward passes until ``zero_grad``, and parameters
    that are frozen, or that no rank uses, have none. Update with ``ZeroOptimizer``, or with
    ``shardwise.ShardedOptimizer(torch.optim.AdamW(model.parameters()))``.

    Parameters named to ``set_params_to_ignore`` before stay whole in the working dtype, with each
    rank's own values and gradients.

    Args:
        module: Any module that is not sharded yet; it is changed in place.
        gemini_manager: Chunk sizes, and where what rests; None keeps everything on the accelerator
            and nothing gathered.
        pin_memory: Without effect: what rests in host memory is page-locked where an accelerator
            copies it, and nothing else is.
        force_outputs_fp32: Cast floating-point outputs to float32, inside of any container.
        strict_ddp_mode: Keep all parameters whole on every rank. Gradients and optimizer state are
            sharded all the same (stage 2), which changes no number.
        process_group: Ranks that train together; default all.
        mixed_precision: The working dtype; None keeps each parameter's own.
        loss_scale: Loss scaling of float16 training.
        units: As in ``shardwise.shard``.
        chunk_bytes: As in ``shardwise.shard``; a manager says it by itself.
        reshard_after_forward: As in ``shardwise.shard``; with True nothing is whole after backward.
            A manager says it by itself.
        offload: As in ``shardwise.shard``, in place of what the manager's policy says.

    Raises:
        ConfigurationError: Before the module is changed.

    Collectives: a check, a broadcast per chunk and buffer.

    Memory per rank, N ranks, Adam: 14/N bytes per parameter, and what is gathered; with
    ``strict_ddp_mode`` 2 + 12/N.

    Example:
        >>> import shardwise as sw
        >>> model = ZeroDDP(nn.Linear(4, 2), force_outputs_fp32=True)
        >>> optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters()))
        >>> optimizer.backward(model(torch.ones(1, 4)).sum())
        >>> optimizer.step()
        >>> model.state_dict()["weight"].dtype
        torch.float32
    """

    def __init__(  # noqa: PLR0913 - the signature that scripts were written for
        self,
        module: nn.Module,
        gemini_manager: GeminiManager | None = None,
        pin_memory: bool = False,
        force_outputs_fp32: bool = False,
        strict_ddp_mode: bool = False,
        *,
        process_group: dist.ProcessGroup | None = None,
        mixed_precision: torch.dtype | None = torch.float16,
        loss_scale: LossScale | None = None,
        units: Iterable[type[nn.Module]] | None = None,
        chunk_bytes: int | None = None,
        reshard_after_forward: bool | int = True,
        offload: StaticOffload | AdaptiveOffload | None = None,
    ) -> None:
        nn.Module.__init__(self)
        _check(module, strict_ddp_mode=strict_ddp_mode)
        stage = GRADIENT_STAGE if strict_ddp_mode else PARAMETER_STAGE
        how = Sharding(
            stage=stage,
            offload=offload,
            chunk_bytes=chunk_bytes,
            reshard_after_forward=reshard_after_forward,
        )
        if gemini_manager is not None:
            how = _managed(module, gemini_manager, mixed_precision, process_group, how)
        precision = MixedPrecision(
            param_dtype=mixed_precision,
            output_dtype=torch.float32 if force_outputs_fp32 else None,
            loss_scale=LossScale() if loss_scale is None else loss_scale,
        )
        ignored = [p for p in module.parameters() if getattr(p, IGNORED, False)]
        group = process_group
        with rounded(list(_to_be_cast(module)), mixed_precision):
            self.module = shard(
                module,
                stage=how.stage,
                mesh=None if group is None else mesh_of(group, 1, device_for(module, None)),
                units=units,
                mixed_precision=precision,
                chunk_bytes=how.chunk_bytes,
                reshard_after_forward=how.reshard_after_forward,
                ignored=ignored,
                offload=how.offload,
            )
        self.gemini_manager = gemini_manager
        if gemini_manager is not None:
            gemini_manager.serve(module, engine_of(module))
        _warn_of_local_gradients(module)

    @property
    def chunk_manager(self) -> ChunkManager | None:
        """That of the manager."""
        return None if self.gemini_manager is None else self.gemini_manager.chunk_manager

    # ------------------------------------------------------------------ one pass

    def forward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - that of the module
        """Call the module."""
        with self._watching():
            return self.module(*args, **kwargs)

    def _watching(self, *, is_backward: bool = False) -> AbstractContextManager[None]:
        """Let the first pass be recorded where the policy asks for it."""
        manager = self.gemini_manager
        return nullcontext() if manager is None else manager.watching(is_backward=is_backward)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients of a scalar loss and reduce them, as ``loss.backward()`` does.

        Raises:
            ShardwiseError: An optimizer has to scale the loss of this float16 model, or divides by
                weights: call its ``backward``.

        Collectives: a reduce-scatter per chunk, begun during the pass, and one agreement.
        """
        check_loss(loss)
        self._run("backward", loss.backward)

    def backward_by_grad(self, tensor: torch.Tensor, grad: torch.Tensor) -> None:
        """As ``backward``, from a gradient of ``tensor`` that came from elsewhere."""
        self._run("backward_by_grad", partial(torch.autograd.backward, tensor, grad))

    def _run(self, call: str, run: Callable[[], None]) -> None:
        """Run a backward pass whose factors are known."""
        engine = engine_of(self.module)
        refusal = engine.reducer.bare_backward_refusal
        if refusal is not None and any(record.is_claimed for record in engine.records):
            raise ShardwiseError(
                mismatch(
                    f"ZeroDDP.{call}",
                    expected="a model without an optimizer that scales or weighs losses",
                    got=refusal,
                    fix=f"call optimizer.{call}",
                )
            )
        with self._watching(is_backward=True):
            engine.reducer.backward(run)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Begin a new sum of gradients: forget them, or keep zeros.

        Also recovers from a backward pass that ended in an error.
        """
        engine = engine_of(self.module)
        engine.zero_grad(engine.records, set_to_none=set_to_none)
        for parameter in engine.left_out:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    # ------------------------------------------------------------------ state

    def state_dict(  # pyrefly: ignore [bad-override] - not every argument of torch's is here
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        only_rank_0: bool = True,
        strict: bool = True,
    ) -> dict[str, Any]:
        """Return the whole state under torch's names, on the CPU.

        Parameters are float32 (float64 ones stay), exactly as an optimizer updates them; a frozen
        16-bit one is what it was rounded to. Buffers keep their dtype, and non-persistent ones are
        left out. It loads into the plain module.

        Args:
            destination: A dict to write to, as in torch.
            prefix: Of every name.
            keep_vars: False: there are no variables to keep.
            only_rank_0: Other ranks than the first return ``destination`` as it was, or an empty
                dict.
            strict: Name a tied parameter at every place where the module has it, as torch does;
                False: at the first alone.

        Raises:
            ConfigurationError: ``keep_vars`` is asked for.
            ShardwiseError: Inside ``full_parameters``.

        Collectives: an all-gather per chunk.
        """
        if keep_vars:
            raise ConfigurationError(
                mismatch(
                    "keep_vars",
                    expected=False,
                    got=keep_vars,
                    fix="drop it, or read parameters inside shardwise.full_parameters(model)",
                )
            )
        state = whole_state(
            self.module,
            prefix=prefix,
            repeats_tied=strict,
            is_kept=not only_rank_0 or is_first_rank(self.module),
        )
        if destination is None:
            return state
        destination.update(state)
        if hasattr(destination, "_metadata"):
            destination._metadata.update(getattr(state, "_metadata", {}))
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:  # noqa: ANN401 - what torch returns
        """Load a whole state on every rank: of ``state_dict``, or of the plain module.

        The values are kept exactly, 16-bit parameters are rounded from them. An optimizer's own
        state stays.

        Args:
            state_dict: The same on all ranks.
            strict: Refuse names that are missing or too many.
            assign: False: values are copied into the chunks.

        Returns:
            Missing and unexpected names, as torch.

        Raises:
            RuntimeError: Torch's message about names and shapes; nothing is changed.
            ConfigurationError: Ranks were given different states, on all ranks; or ``assign``.

        Collectives: one all-reduce of two numbers.
        """
        if assign:
            raise ConfigurationError(
                mismatch("assign", expected=False, got=assign, fix="drop it: values are copied")
            )
        return load_whole_state(self.module, state_dict, strict=strict)


def _managed(
    module: nn.Module,
    manager: GeminiManager,
    dtype: torch.dtype | None,
    group: dist.ProcessGroup | None,
    given: Sharding,
) -> Sharding:
    """Return how a manager shards a module; refuse settings that it has itself."""
    if not isinstance(manager, GeminiManager):
        raise ConfigurationError(
            mismatch(
                "gemini_manager",
                expected="a GeminiManager or None",
                got=f"a {type(manager).__name__}",
                fix='write GeminiManager("cuda", chunk_manager)',
            )
        )
    doubled = {"chunk_bytes": given.chunk_bytes is not None}
    doubled["reshard_after_forward"] = given.reshard_after_forward is not True
    for name, is_given in doubled.items():
        if is_given:
            raise ConfigurationError(
                mismatch(
                    name,
                    expected="nothing beside a gemini_manager",
                    got=repr(getattr(given, name)),
                    fix="drop it, or pass gemini_manager=None",
                )
            )
    how = manager.sharding(
        [p for p in module.parameters() if not getattr(p, IGNORED, False)],
        dtype=dtype,
        num_ranks=num_ranks_of(module, group),
    )
    if given.stage != PARAMETER_STAGE:
        how = manager.whole(how)
    return how if given.offload is None else replace(how, offload=given.offload)


def _check(module: nn.Module, *, strict_ddp_mode: bool) -> None:
    """Refuse what has no meaning here."""
    if strict_ddp_mode and any(isinstance(p, DTensor) for p in module.parameters()):
        raise ConfigurationError(
            mismatch(
                "strict_ddp_mode",
                expected="parameters that every rank has whole",
                got="parameters that are split over a model axis",
                fix="wrap the module before it is split, or pass strict_ddp_mode=False",
            )
        )


def _to_be_cast(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the ignored parameters that the working dtype applies to."""
    for part in module.modules():
        if not isinstance(part, _BatchNorm):
            yield from (p for p in part.parameters(recurse=False) if getattr(p, IGNORED, False))


def _warn_of_local_gradients(module: nn.Module) -> None:
    """Say which parameters this rank updates by itself, if at all."""
    names = [
        name
        for name, parameter in module.named_parameters()
        if getattr(parameter, IGNORED, False) and parameter.requires_grad
    ]
    if names:
        warnings.warn(
            f"ignored parameters require gradients, which stay on each rank: {', '.join(names)}; "
            "reduce and update them yourself, or freeze them.",
            stacklevel=3,
        )
