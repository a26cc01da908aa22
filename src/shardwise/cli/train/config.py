"""What a training run can be told: frozen dataclasses, one per section of the TOML file.

Reading files and wording mistakes is ``settings``; nothing here touches the disk or torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field

Size = Literal["tiny", "small", "medium", "large", "deep"]
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Device = Literal["auto", "cpu", "cuda"]
Stage = Literal[0, 1, 2, 3]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]

FORBID_UNKNOWN: ConfigDict = {"extra": "forbid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Where the text comes from and how it is cut."""

    __pydantic_config__: ClassVar[ConfigDict] = FORBID_UNKNOWN

    path: str | None = None
    """A text file or a folder of text files; absent: the Python standard library's source."""

    sequence: Annotated[int, Field(ge=2)] = 128
    """Bytes (= tokens) per sample, the length of the model's context."""

    limit_bytes: Count = 16 * 2**20
    """At most this many bytes of text are read."""

    validation_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.05
    """Share of the text, from its end, that is never trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardConfig:
    """How the training state is held; passed on to ``shardwise.shard``."""

    __pydantic_config__: ClassVar[ConfigDict] = FORBID_UNKNOWN

    stage: Stage = 2
    """0 replicates, 1 shards the optimizer state, 2 also the gradients, 3 also the parameters."""

    precision: Precision = "auto"
    """Working precision; 16-bit keeps fp32 masters. auto: bf16 where the processor has bf16
    instructions, else fp32."""

    shard_size: Count | None = None
    """Shard inside groups of so many ranks and replicate across groups; absent: all ranks."""

    chunk_bytes: Count | None = None
    """Size of a chunk; absent: shardwise chooses."""

    offload_optimizer: Share = 0.0
    """Fraction of masters and optimizer state that rests off the accelerator."""

    offload_parameters: Share = 0.0
    """Fraction of the parameters' slices that does so between uses; stage 3."""

    offload_path: str | None = None
    """Folder on a local disk where these rest; absent: host memory."""

    accelerator_budget: str | int | None = None
    """Bytes that a rank may hold on the accelerator, such as "64MiB": the rest goes elsewhere."""

    host_budget: str | int | None = None
    """Bytes that a rank may hold in host memory; absent: no limit."""

    disk_budget: str | int | None = None
    """Bytes that a rank may hold on disk; absent: no limit where there is a path."""

    disk_path: str | None = None
    """Folder on a local disk for what the other budgets leave no room for; absent: no disk."""

    device: Device = "auto"
    """auto: the accelerator that torch finds, else the processor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule."""

    __pydantic_config__: ClassVar[ConfigDict] = FORBID_UNKNOWN

    learning_rate: Positive = 3e-3
    """Highest learning rate, reached at the end of the warm-up."""

    warmup_steps: CountOrZero = 50
    """Steps over which the learning rate rises linearly from near 0."""

    final_fraction: Fraction = 0.05
    """Share of the highest learning rate that is left at the last step (cosine in between)."""

    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.1
    """Decoupled decay; on matrices only, never on the scales of the norms."""

    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """Decay of the running mean of gradients."""

    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.95
    """Decay of the running mean of squared gradients."""

    clip_grad_norm: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 1.0
    """Largest global gradient norm; 0 switches clipping off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """How long to train, and what to write down on the way."""

    __pydantic_config__: ClassVar[ConfigDict] = FORBID_UNKNOWN

    steps: Count = 1000
    """Optimizer steps."""

    batch: Count = 4
    """Samples per rank and micro-batch."""

    accumulation: Count = 1
    """Micro-batches per step."""

    seed: CountOrZero = 0
    """Seeds the weights, the choice of samples and the sample text."""

    validate_every: CountOrZero = 250
    """Steps between validations; 0: only at the end."""

    validation_samples: Count = 128
    """Samples of one validation, over all ranks; always the same ones."""

    sample_bytes: CountOrZero = 240
    """Length of the text written by the model at the end; 0: none."""

    check_parity: CountOrZero = 0
    """Steps of the comparison with one plain process before training; 0: none."""

    checkpoint_dir: str | None = None
    """Folder for checkpoints; absent: none are written."""

    save_every: CountOrZero = 0
    """Steps between checkpoints; 0: only at the end, at Ctrl-C and at SIGTERM."""

    keep_last: Count = 2
    """How many of the newest checkpoints to keep."""

    resume: bool = True
    """Continue from the newest good checkpoint of the folder, if there is one."""

    out: str | None = None
    """Folder for metrics.jsonl, config.toml, summary.json and report.md; absent: not written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """Everything ``shardwise train`` can be told; a field is a section of the TOML file."""

    __pydantic_config__: ClassVar[ConfigDict] = FORBID_UNKNOWN

    model: Size = "small"
    """Size of the model; ``model.SIZES`` lists width, depth and heads."""

    data: DataConfig = field(default_factory=DataConfig)
    """Where the text comes from."""

    shard: ShardConfig = field(default_factory=ShardConfig)
    """How the training state is held."""

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """AdamW and its schedule."""

    run: RunConfig = field(default_factory=RunConfig)
    """How long, and what to write down."""
