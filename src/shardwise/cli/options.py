"""The options of ``shardwise train``: their types, help texts and groups."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

# An option is None unless it is given: then the file's value stands, or the default named in the
# help text.
_RUN, _SHARD, _TRAINING = "The run", "Sharding", "Training"

Config = Annotated[
    Path | None,
    typer.Option(help="TOML file with any of the settings; options win.", rich_help_panel=_RUN),
]
Ranks = Annotated[
    int | None,
    typer.Option(
        help="Start this many processes here, as torchrun would.",
        show_default="this one",
        rich_help_panel=_RUN,
        min=1,
    ),
]
Out = Annotated[
    str | None,
    typer.Option(
        help="Folder for metrics.jsonl, config.toml, summary.json and report.md.",
        show_default="none",
        rich_help_panel=_RUN,
    ),
]
CheckParity = Annotated[
    int | None,
    typer.Option(
        metavar="STEPS",
        help="First compare so many steps with one plain process.",
        show_default="0",
        rich_help_panel=_RUN,
    ),
]
CheckpointDir = Annotated[
    str | None,
    typer.Option(
        metavar="DIR",
        help="Folder for checkpoints; a run continues from the newest good one.",
        show_default="none",
        rich_help_panel=_RUN,
    ),
]
SaveEvery = Annotated[
    int | None,
    typer.Option(
        metavar="STEPS",
        help="Steps between checkpoints, 0 for one at the end.",
        show_default="0",
        rich_help_panel=_RUN,
    ),
]
Resume = Annotated[
    bool | None,
    typer.Option(
        "--resume/--no-resume",
        help="Continue from the newest good checkpoint, or start over.",
        show_default="--resume",
        rich_help_panel=_RUN,
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Of weights, samples and text.", show_default="0", rich_help_panel=_RUN),
]
Stage = Annotated[
    int | None,
    typer.Option(
        help="0 replicates, 1 shards optimizer state, 2 also gradients, 3 also parameters.",
        show_default="2",
        rich_help_panel=_SHARD,
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        metavar="auto|fp32|bf16|fp16",
        help="auto is bf16 where the processor has bf16 instructions, else fp32.",
        show_default="auto",
        rich_help_panel=_SHARD,
    ),
]
ShardSize = Annotated[
    int | None,
    typer.Option(
        metavar="RANKS",
        help="Shard inside groups of so many ranks, replicate across.",
        show_default="all ranks",
        rich_help_panel=_SHARD,
    ),
]
OffloadOptimizer = Annotated[
    float | None,
    typer.Option(
        metavar="FRACTION",
        help="Of masters and optimizer state, that rests off the accelerator.",
        show_default="0",
        rich_help_panel=_SHARD,
    ),
]
OffloadParameters = Annotated[
    float | None,
    typer.Option(
        metavar="FRACTION",
        help="Of the parameters' slices, that rests off the accelerator; stage 3.",
        show_default="0",
        rich_help_panel=_SHARD,
    ),
]
OffloadPath = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="On a local disk, where these rest.",
        show_default="host memory",
        rich_help_panel=_SHARD,
    ),
]
AcceleratorBudget = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Of the accelerator, a rank: what does not fit goes to host, then disk.",
        show_default="no limit",
        rich_help_panel=_SHARD,
    ),
]
HostBudget = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Of host memory, a rank.",
        show_default="no limit",
        rich_help_panel=_SHARD,
    ),
]
DiskBudget = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Of disk, a rank.", show_default="no limit", rich_help_panel=_SHARD
    ),
]
DiskPath = Annotated[
    str | None,
    typer.Option(
        metavar="FOLDER",
        help="On a local disk, for what the budgets leave no room for.",
        show_default="no disk",
        rich_help_panel=_SHARD,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        metavar="auto|cpu|cuda",
        help="auto is an accelerator if there is one.",
        show_default="auto",
        rich_help_panel=_SHARD,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="tiny|small|medium|large",
        help="Size of the GPT.",
        show_default="small",
        rich_help_panel=_TRAINING,
    ),
]
Data = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Text file or folder.",
        show_default="the source of the Python standard library",
        rich_help_panel=_TRAINING,
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(help="Optimizer steps.", show_default="1000", rich_help_panel=_TRAINING),
]
Batch = Annotated[
    int | None,
    typer.Option(
        help="Samples per rank and micro-batch.", show_default="4", rich_help_panel=_TRAINING
    ),
]
Accumulation = Annotated[
    int | None,
    typer.Option(help="Micro-batches per step.", show_default="1", rich_help_panel=_TRAINING),
]
Sequence = Annotated[
    int | None,
    typer.Option(help="Bytes per sample.", show_default="128", rich_help_panel=_TRAINING),
]
LearningRate = Annotated[
    float | None,
    typer.Option(
        help="Highest rate of the schedule.", show_default="0.003", rich_help_panel=_TRAINING
    ),
]
ClipGradNorm = Annotated[
    float | None,
    typer.Option(
        help="Largest global gradient norm, 0 for none.",
        show_default="1.0",
        rich_help_panel=_TRAINING,
    ),
]
ValidateEvery = Annotated[
    int | None,
    typer.Option(
        metavar="STEPS",
        help="Steps between validations, 0 for one at the end.",
        show_default="250",
        rich_help_panel=_TRAINING,
    ),
]
