"""Step time, memory and traffic of every stage beside DistributedDataParallel and FSDP2.

All contestants are alive together, each in its own two processes of one thread, and take turns in
rounds of a few steps, so that a slow minute of the machine meets all of them. The baseline takes
part twice: what its copy differs by is what this machine cannot tell apart.

    python -m benchmarks.step_time --dtype bf16
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import random
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from benchmarks import resident
from benchmarks.contestants import BASELINE, CONTESTANTS, Contestant, Dtype
from benchmarks.gpt import GPT, SIZES, GPTConfig
from benchmarks.rank import MemoryOrder, MemoryResult, RoundOrder, RoundResult
from benchmarks.ranks import WORLD_SIZE, Ranks, start_ranks
from benchmarks.results_table import Measurement, describe_machine, machine_slug, make_table

if TYPE_CHECKING:
    from collections.abc import Sequence

_RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run of the benchmark."""

    size: str
    dtype: Dtype
    num_rounds: int
    num_steps: int
    with_memory: bool
    chunk_bytes: int | None
    seed: int
    contestants: tuple[Contestant, ...]

    @property
    def config(self) -> GPTConfig:
        """The model."""
        return SIZES[self.size]


def measure(settings: Settings, folder: Path) -> list[Measurement]:
    """Measure memory one contestant at a time, then time all of them in interleaved rounds."""
    shuffle = random.Random(settings.seed).sample
    everyone = settings.contestants
    memory: dict[str, MemoryResult] = {}
    if settings.with_memory:
        for contestant in everyone:
            with _start(contestant, settings, folder, is_for_memory=True) as ranks:
                answers: list[MemoryResult] = ranks.ask(MemoryOrder())
            memory[contestant.name] = max(answers, key=lambda answer: answer.held_bytes)
            print(f"memory: {contestant.name} done", flush=True)

    rounds: dict[str, list[list[RoundResult]]] = {one.name: [] for one in everyone}
    with ExitStack() as stack:
        alive: dict[str, Ranks] = {}
        _compact_memory()
        # Processes started first get better or worse pages for life: not always the same ones.
        for contestant in shuffle(everyone, len(everyone)):
            ranks = stack.enter_context(_start(contestant, settings, folder))
            ranks.ask(RoundOrder(num_steps=1))
            alive[contestant.name] = ranks
        for number in range(settings.num_rounds):
            for contestant in shuffle(everyone, len(everyone)):
                order = RoundOrder(num_steps=settings.num_steps)
                rounds[contestant.name].append(alive[contestant.name].ask(order))
            print(f"round {number + 1} of {settings.num_rounds} done", flush=True)
    return [_summarise(one, settings, rounds[one.name], memory.get(one.name)) for one in everyone]


def _start(
    contestant: Contestant, settings: Settings, folder: Path, *, is_for_memory: bool = False
) -> contextlib.AbstractContextManager[Ranks]:
    return start_ranks(
        contestant,
        settings.config,
        dtype=settings.dtype,
        chunk_bytes=settings.chunk_bytes,
        folder=folder,
        environment=resident.RETURN_FREED_BLOCKS if is_for_memory else {},
    )


def _summarise(
    contestant: Contestant,
    settings: Settings,
    rounds: list[list[RoundResult]],
    memory: MemoryResult | None,
) -> Measurement:
    """Reduce the rounds of one contestant to what the table shows."""
    with torch.device("meta"):
        numel = sum(p.numel() for p in GPT(settings.config).parameters())
    element_bytes = 2 if settings.dtype == "bf16" else 4
    return Measurement(
        name=contestant.name,
        steps_s=[max(result.step_s for result in results) for results in rounds],
        sent_bytes=min(results[0].sent_bytes for results in rounds) // WORLD_SIZE,
        least_sent_bytes=2 * numel * element_bytes * (WORLD_SIZE - 1) // WORLD_SIZE,
        held_bytes=memory.held_bytes if memory else None,
        peak_bytes=memory.peak_bytes if memory else None,
        loss=rounds[-1][0].loss,
    )


def _compact_memory() -> None:
    """Give every contestant whole pages, where that is allowed (root)."""
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/compact_memory").write_text("1")


def make_report(settings: Settings, measurements: list[Measurement], today: str) -> str:
    """Return the page that is written: what, on what, how, and the table."""
    config = settings.config
    return (
        f"# Step time, {settings.dtype}, {settings.size} model, {today}\n\n"
        f"{describe_machine()}.\n\n"
        f"{WORLD_SIZE} ranks of one thread; width {config.width}, {config.num_blocks} blocks, "
        f"sequence {config.sequence}, batch {config.batch} per rank, vocabulary "
        f"{config.vocabulary}; AdamW(fused=True), no clipping; {settings.num_rounds} interleaved "
        f"rounds of {settings.num_steps} steps, seed {settings.seed}"
        + (f", chunk_bytes={settings.chunk_bytes}" if settings.chunk_bytes else "")
        + ".\n\n"
        + make_table(measurements)
        + "\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, print the table, and write it beside the others."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--tiny", action="store_true", help="a toy model: does it run at all")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a round")
    parser.add_argument("--no-memory", action="store_true", help="skip held and peak bytes")
    parser.add_argument("--chunk-bytes", type=int, default=None, help="passed to shardwise.shard")
    parser.add_argument("--seed", type=int, default=0, help="of the orders")
    parser.add_argument(
        "--only", nargs="+", default=None, help="parts of the names of those that take part"
    )
    parser.add_argument("--out", type=Path, default=_RESULTS, help="folder of the written table")
    given = parser.parse_args(arguments)
    chosen = [
        one
        for one in CONTESTANTS
        if given.only is None
        or one.name == BASELINE
        or any(part.lower() in one.name.lower() for part in given.only)
    ]
    settings = Settings(
        size="tiny" if given.tiny else "full",
        dtype=cast("Dtype", given.dtype),
        num_rounds=given.rounds,
        num_steps=given.steps,
        with_memory=not given.no_memory,
        chunk_bytes=given.chunk_bytes,
        seed=given.seed,
        contestants=tuple(chosen),
    )
    with tempfile.TemporaryDirectory(prefix="step-time-") as folder:
        measurements = measure(settings, Path(folder))
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    report = make_report(settings, measurements, today)
    print(f"\n{report}")
    given.out.mkdir(parents=True, exist_ok=True)
    name = f"step_time_{settings.size}_{settings.dtype}_{machine_slug()}_{today}.md"
    (given.out / name).write_text(report)


if __name__ == "__main__":
    main()
