"""What data-parallel training must compute, in one process and plain PyTorch.

The oracle computes the ranks' gradients one after the other, adds them in rank order and divides
once; a correct engine that does the same is bit-equal to it. It shares no code with the engine.

A test gives both the same three functions: `build_model()`, `build_optimizer(model)` and
`loss(model)`. Before each call of `loss` both call `seed(...)`, so inputs and dropout agree.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.kit.models import Loss

Gradients = dict[str, Tensor | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleOptions:
    """How the ranks that the oracle stands for are said to train."""

    world_size: int
    """Number of ranks."""
    num_steps: int = 3
    """Number of optimizer steps."""
    num_micro_batches: int = 1
    """Backwards per rank and step."""
    accumulate: Literal["reduced", "local"] = "reduced"
    """Add micro-batches up after each is reduced, or on each rank before one reduction
    (`no_sync`, stage 1). The same in exact arithmetic, not in the last bit."""
    gradient_reduction: Literal["mean", "sum"] = "mean"
    """Whether the sum over ranks is divided by their number."""
    weight: Callable[[int, int, int], float] | None = None
    """(step, rank, micro-batch) -> its weight; the loss is then a sum, and gradients are divided
    by the sum of all weights of the step instead of by the number of ranks."""
    clip_grad_norm: float | None = None
    """Greatest global norm, None does not clip."""
    norm_type: float = 2.0
    """Which norm."""
    param_dtype: torch.dtype | None = None
    """Dtype of the ranks' working parameters; the optimizer keeps those of `build_model()`.
    Batch-norm modules stay as they are."""
    reduce_dtype: torch.dtype | None = None
    """Dtype of a reduced and of an accumulated gradient; None is the working parameter's. Sums
    over ranks are formed in float32 or wider."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Everything there is to compare after one step."""

    losses: list[list[float]]
    """[rank][micro-batch]."""
    grad_norm: float
    """Global norm before clipping."""
    gradients: Gradients = field(repr=False)
    """The reduced gradients before clipping; None where no rank used the parameter."""
    parameters: dict[str, Tensor] = field(repr=False)
    """After the step, as the optimizer has them."""
    buffers: list[dict[str, Tensor]] = field(repr=False)
    """[rank] -> buffers of its replica."""


def seed(*, step: int, rank: int, micro_batch: int) -> None:
    """Seed torch for one micro-batch of one rank."""
    torch.manual_seed(1 + micro_batch + 100 * rank + 10_000 * step)


def run_oracle(
    build_model: Callable[[], nn.Module],
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Loss,
    options: OracleOptions,
) -> list[StepRecord]:
    """Train and return one record a step.

    Args:
        build_model: Makes the model; torch is seeded with 0 before.
        build_optimizer: Makes any optimizer over the model's parameters.
        loss: Returns the loss of one micro-batch.
        options: What the ranks do.
    """
    torch.manual_seed(0)
    model = build_model()
    optimizer = build_optimizer(model)
    replicas = [_make_replica(model, options.param_dtype) for _ in range(options.world_size)]
    return [
        _run_step(model, optimizer, replicas, loss, step=step, options=options)
        for step in range(options.num_steps)
    ]


def _run_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    replicas: list[nn.Module],
    loss: Loss,
    *,
    step: int,
    options: OracleOptions,
) -> StepRecord:
    """Do what the ranks do between two steps, rank by rank."""
    micro_batches = range(options.num_micro_batches)
    losses: list[list[float]] = [[] for _ in replicas]
    grid: list[list[Gradients]] = [[] for _ in replicas]
    for micro_batch in micro_batches:
        for rank, replica in enumerate(replicas):
            seed(step=step, rank=rank, micro_batch=micro_batch)
            value = loss(replica)
            replica.zero_grad(set_to_none=True)
            value.backward()
            losses[rank].append(value.item())
            grid[rank].append(_take_gradients(replica, options.reduce_dtype))
    if options.accumulate == "local":
        total = _reduce([_add_up(of_rank) for of_rank in grid], options)
    else:
        total = _add_up([_reduce([row[m] for row in grid], options) for m in micro_batches])
    if options.weight is not None:
        sum_of_weights = sum(
            options.weight(step, rank, m) for rank in range(len(replicas)) for m in micro_batches
        )
        total = {name: None if g is None else g / sum_of_weights for name, g in total.items()}

    grad_norm = _update(model, optimizer, total, options)
    for replica in replicas:
        _copy_parameters(model, replica)
    return StepRecord(
        losses=losses,
        grad_norm=grad_norm,
        gradients=total,
        parameters={name: p.detach().clone() for name, p in model.named_parameters()},
        buffers=[{name: b.clone() for name, b in one.named_buffers()} for one in replicas],
    )


def _take_gradients(replica: nn.Module, dtype: torch.dtype | None) -> Gradients:
    """Take what one backward left, in the dtype in which gradients are added up."""
    return {
        name: None if p.grad is None else p.grad.to(dtype or p.grad.dtype)
        for name, p in replica.named_parameters()
    }


def _reduce(of_ranks: list[Gradients], options: OracleOptions) -> Gradients:
    """Add in rank order, then divide once. A parameter that no rank used stays None."""
    reduced: Gradients = {}
    for name in of_ranks[0]:
        used = [gradients[name] for gradients in of_ranks]
        present = [gradient for gradient in used if gradient is not None]
        if not present:
            reduced[name] = None
            continue
        dtype = present[0].dtype
        total = present[0].to(torch.promote_types(dtype, torch.float32), copy=True)
        for gradient in present[1:]:
            total += gradient
        if options.gradient_reduction == "mean" and options.weight is None:
            total /= len(of_ranks)
        reduced[name] = total.to(dtype)
    return reduced


def _add_up(of_micro_batches: list[Gradients]) -> Gradients:
    """Add gradients of micro-batches in their order and dtype."""
    total = dict(of_micro_batches[0])
    for gradients in of_micro_batches[1:]:
        for name, gradient in gradients.items():
            sum_so_far = total[name]
            if gradient is not None:
                total[name] = gradient if sum_so_far is None else sum_so_far + gradient
    return total


def _update(
    model: nn.Module, optimizer: torch.optim.Optimizer, total: Gradients, options: OracleOptions
) -> float:
    """Give the model its gradients, clip them, step; return the norm before clipping."""
    for name, parameter in model.named_parameters():
        gradient = total[name]
        parameter.grad = None if gradient is None else gradient.to(parameter.dtype, copy=True)
    present = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(present, options.norm_type)
    if options.clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), options.clip_grad_norm, options.norm_type)
    optimizer.step()
    return float(norm)


def _make_replica(model: nn.Module, param_dtype: torch.dtype | None) -> nn.Module:
    """Copy the model as one rank holds it; floating-point inputs are cast as the parameters are."""
    replica = copy.deepcopy(model)
    if param_dtype is None:
        return replica
    for module in replica.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(param_dtype)

    def cast(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(
            x.to(param_dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
            for x in inputs
        )

    replica.register_forward_pre_hook(cast)
    return replica


def _copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Bring a replica to the updated values."""
    with torch.no_grad():
        pairs = zip(source.parameters(), target.parameters(), strict=True)
        for new, old in pairs:
            old.copy_(new)


def assert_bit_equal(
    actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None], *, what: str = ""
) -> None:
    """Compare tensors by name: same shape, dtype and every value; NaN equals NaN, -0 equals 0.

    Raises:
        AssertionError: With one line for each tensor that differs.
    """
    names = [*expected, *(name for name in actual if name not in expected)]
    lines = [
        f"  {name}: {difference}"
        for name in names
        if (difference := _describe_difference(name, actual, expected))
    ]
    if lines:
        header = f"{what or 'tensors'}: {len(lines)} of {len(names)} differ"
        raise AssertionError("\n".join([header, *lines]))


def _describe_difference(
    name: str, actual: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]
) -> str:
    """Say how two tensors differ; empty when they do not."""
    if name not in actual or name not in expected:
        return "missing" if name not in actual else "not expected"
    a, b = actual[name], expected[name]
    if a is None or b is None:
        return "" if a is b else f"is {_sketch(a)}, expected {_sketch(b)}"
    a, b = a.detach(), b.detach()
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return f"is {_sketch(a)}, expected {_sketch(b)}"
    differs = (a != b) & ~(a.isnan() & b.isnan())
    if not differs.any():
        return ""
    first = tuple(differs.nonzero()[0].tolist())
    largest = (a.double() - b.double()).abs().max().item()
    return (
        f"{int(differs.sum())} of {a.numel()} values differ, max abs {largest:.3e}, "
        f"first at {first}: {a[first].item()!r}, expected {b[first].item()!r}"
    )


def _sketch(tensor: Tensor | None) -> str:
    """Shape and dtype in short."""
    return "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype}"
