"""The ``shardwise`` command: its verbs and their options.

It imports typer alone, so that help is quick; what a verb does is imported when it runs.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Final, NoReturn

import typer

from shardwise.cli.options import (
    AcceleratorBudget,
    Accumulation,
    Batch,
    CheckParity,
    CheckpointDir,
    ClipGradNorm,
    Config,
    Data,
    Device,
    DiskBudget,
    DiskPath,
    HostBudget,
    LearningRate,
    Model,
    OffloadOptimizer,
    OffloadParameters,
    OffloadPath,
    Out,
    Precision,
    Ranks,
    Resume,
    SaveEvery,
    Seed,
    Sequence,
    ShardSize,
    Stage,
    Steps,
    ValidateEvery,
)

BAD_INPUT: Final = 2
INTERRUPTED: Final = 130

app = typer.Typer(
    name="shardwise",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Shard the training state of PyTorch models over data-parallel ranks.",
)


@app.command()
def train(  # noqa: PLR0913 - the signature is the list of options
    config: Config = None,
    ranks: Ranks = None,
    out: Out = None,
    check_parity: CheckParity = None,
    checkpoint_dir: CheckpointDir = None,
    save_every: SaveEvery = None,
    resume: Resume = None,
    seed: Seed = None,
    stage: Stage = None,
    precision: Precision = None,
    shard_size: ShardSize = None,
    offload_optimizer: OffloadOptimizer = None,
    offload_parameters: OffloadParameters = None,
    offload_path: OffloadPath = None,
    accelerator_budget: AcceleratorBudget = None,
    host_budget: HostBudget = None,
    disk_budget: DiskBudget = None,
    disk_path: DiskPath = None,
    device: Device = None,
    model: Model = None,
    data: Data = None,
    steps: Steps = None,
    batch: Batch = None,
    accumulation: Accumulation = None,
    sequence: Sequence = None,
    learning_rate: LearningRate = None,
    clip_grad_norm: ClipGradNorm = None,
    validate_every: ValidateEvery = None,
) -> None:
    """Train a small GPT on real text, with its training state sharded over the ranks.

    Runs in one process, under torchrun, or on several ranks by itself with --ranks.
    """
    options: dict[str, object] = {
        "model": model,
        "data.path": data,
        "data.sequence": sequence,
        "shard.stage": stage,
        "shard.precision": precision,
        "shard.shard_size": shard_size,
        "shard.offload_optimizer": offload_optimizer,
        "shard.offload_parameters": offload_parameters,
        "shard.offload_path": offload_path,
        "shard.accelerator_budget": accelerator_budget,
        "shard.host_budget": host_budget,
        "shard.disk_budget": disk_budget,
        "shard.disk_path": disk_path,
        "shard.device": device,
        "optimizer.learning_rate": learning_rate,
        "optimizer.clip_grad_norm": clip_grad_norm,
        "run.steps": steps,
        "run.batch": batch,
        "run.accumulation": accumulation,
        "run.seed": seed,
        "run.validate_every": validate_every,
        "run.check_parity": check_parity,
        "run.checkpoint_dir": checkpoint_dir,
        "run.save_every": save_every,
        "run.resume": resume,
        "run.out": out,
    }
    raise typer.Exit(_train(config, options, num_ranks=ranks))


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="Folder of one checkpoint.")],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print what a checkpoint holds, and whether its files are what was written."""
    from rich.console import Console

    from shardwise.checkpoint.description import describe
    from shardwise.cli.inspection import as_json, inspection_tree
    from shardwise.errors import CheckpointError

    try:
        description = describe(path)
    except (CheckpointError, OSError) as error:
        _refuse(str(error), verb="inspect")
    if json:
        Console().print_json(data=as_json(description))
    else:
        Console(highlight=False).print(inspection_tree(str(path), description), soft_wrap=True)
    raise typer.Exit(1 if description.damage is not None else 0)


@app.command()
def export(
    path: Annotated[Path, typer.Argument(help="Folder of one checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder for the safetensors files.")],
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="fp32|bf16|fp16",
            help="Cast floating-point tensors to this.",
            show_default="as exact as they are",
        ),
    ] = None,
    max_shard_bytes: Annotated[
        int, typer.Option(help="Largest file, unless one tensor is larger.", min=1)
    ] = 5 * 10**9,
) -> None:
    """Write the weights of a checkpoint as safetensors files that from_pretrained reads."""
    from shardwise.checkpoint import export as write
    from shardwise.cli.train.recipe import DTYPES
    from shardwise.errors import CheckpointError

    if dtype is not None and dtype not in DTYPES:
        _refuse(f"--dtype expected {', '.join(DTYPES)} but got {dtype}.", verb="export")
    try:
        files = write(
            path,
            out,
            dtype=None if dtype is None else DTYPES[dtype],
            max_shard_bytes=max_shard_bytes,
        )
    except (CheckpointError, OSError) as error:
        _refuse(str(error), verb="export")
    for file in files:
        typer.echo(file)


def _train(file: Path | None, options: dict[str, object], *, num_ranks: int | None) -> int:
    """Check the settings, then train in this process or start the ranks; returns the exit code."""
    from shardwise.cli.train.settings import load
    from shardwise.errors import BudgetError, CheckpointError, ConfigurationError

    try:
        config = load(file, options)
        from shardwise.cli.train.command import load_text, run
        from shardwise.cli.train.ranks import check_device

        if num_ranks is None or "WORLD_SIZE" in os.environ:
            return run(config)
        check_device(config.shard.device)
        load_text(config)
        from shardwise.cli.launch import launch

        return launch(sys.argv[1:], num_ranks=num_ranks)
    except (BudgetError, ConfigurationError, CheckpointError) as error:
        _refuse(str(error))
    except KeyboardInterrupt:
        return INTERRUPTED


def _refuse(message: str, *, verb: str = "train") -> NoReturn:
    """Say in one line what is wrong, once per machine, and end with the code for bad input."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        typer.echo(f"shardwise {verb}: {message}", err=True)
    raise typer.Exit(BAD_INPUT)
