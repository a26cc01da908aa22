"""``shardwise train`` from a checked configuration to an exit code: the order of its phases.

Prepare (everything a user can get wrong), prove parity, train, report. Each phase is a function
that all ranks run; only the first rank speaks.
"""

from __future__ import annotations

import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from shardwise.cli.train import summary as summaries
from shardwise.cli.train import tiers
from shardwise.cli.train.checkpoints import Checkpoints
from shardwise.cli.train.corpus import Corpus, load_corpus
from shardwise.cli.train.engine import (
    Learner,
    build_learner,
    mixed_precision,
    offload,
    settle_precision,
)
from shardwise.cli.train.feed import Feed
from shardwise.cli.train.interrupt import (
    StopRequest,
    end_with_launcher,
    exit_code,
    name_of,
)
from shardwise.cli.train.journal import Journal
from shardwise.cli.train.loop import History, train
from shardwise.cli.train.metrics import METRICS_NAME, MetricsFile
from shardwise.cli.train.parity import ParityResult, compare, comparisons
from shardwise.cli.train.peak import peak_bytes, reset_peak
from shardwise.cli.train.progress import TrainingProgress
from shardwise.cli.train.ranks import Ranks, check_device, is_of_lost_rank
from shardwise.cli.train.sample import Sample, write_sample
from shardwise.cli.train.settings import to_toml
from shardwise.cli.train.table import CATEGORIES, ELSEWHERE, MemoryRow, memory_rows, memory_table
from shardwise.errors import BudgetError, ConfigurationError
from shardwise.options import AdaptiveOffload
from shardwise.report import closed_form

if TYPE_CHECKING:
    from shardwise.cli.train.config import TrainConfig
    from shardwise.cli.train.tiers import TierRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What every phase needs, settled before the first collective."""

    config: TrainConfig
    ranks: Ranks
    feed: Feed
    folder: Path | None
    """Where this rank writes; None where there is nothing to write."""
    console: Console
    stop: StopRequest


def run(config: TrainConfig) -> int:
    """Train as configured; collective, on all ranks.

    Returns:
        The exit code, the same on all ranks: 0, 1 where parity does not hold, 130 after Ctrl-C,
        143 after SIGTERM.

    Raises:
        ConfigurationError: Something that cannot work, found before anything started.
    """
    with StopRequest() as stop:
        end_with_launcher()
        prepared = _prepare(config, stop)
        try:
            code = _run(prepared)
            prepared.ranks.leave()
        except RuntimeError as error:
            if stop.signal != signal.SIGTERM or not is_of_lost_rank(error):
                raise
            # sent because a rank is gone, more often than not: no step ends without it
            sys.stderr.write(
                f"shardwise train: rank {prepared.ranks.rank} ended by SIGTERM in a step that it "
                f"could not finish: {error}\n"
            )
            code = exit_code(stop.signal)
        return code


def _run(run: Run) -> int:
    """Prove parity, then train; returns the exit code."""
    parity = _prove(run)
    if parity is None:
        run.console.print("Stopped during the parity check; nothing was trained.")
        return exit_code(run.stop.signal)
    if not all(result.has_passed for result in parity):
        run.console.print("Sharded training differs from one plain process; not training.")
        return 1
    return _train(run, parity)


def load_text(config: TrainConfig) -> Corpus:
    """Read the text that a configuration names, or refuse it."""
    return load_corpus(
        config.data.path,
        sequence=config.data.sequence,
        limit_bytes=config.data.limit_bytes,
        validation_fraction=config.data.validation_fraction,
    )


def _prepare(config: TrainConfig, stop: StopRequest) -> Run:
    """Settle what is left open, read the text, make the folder; no communication."""
    ranks = Ranks.from_environment()
    ranks.share_processor()
    check_device(config.shard.device)
    if config.run.save_every and config.run.checkpoint_dir is None:
        raise ConfigurationError("--save-every expected --checkpoint-dir beside it but got none.")
    corpus = load_text(config)
    folder = _make_folder(config.run.out, option="--out")
    _make_folder(config.run.checkpoint_dir, option="--checkpoint-dir")
    device = ranks.device(config.shard.device)
    config = settle_precision(config, device)
    if folder is not None and ranks.is_first:
        (folder / "config.toml").write_text(to_toml(config), encoding="utf-8")
    return Run(
        config=config,
        ranks=ranks,
        feed=Feed.of(config, corpus, world_size=ranks.world_size, device=device),
        folder=folder if ranks.is_first else None,
        console=Console(quiet=not ranks.is_first),
        stop=stop,
    )


def _make_folder(out: str | None, *, option: str) -> Path | None:
    """Create a folder that an option names."""
    if out is None:
        return None
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise ConfigurationError(f"{option} expected a folder but got {out}: {reason}.") from None
    return folder


def _prove(run: Run) -> list[ParityResult] | None:
    """Compare with one plain process; None if stopped on the way."""
    results: list[ParityResult] = []
    if run.config.run.check_parity == 0:
        return results
    run.console.rule("against one plain process on the joined batch", align="left")
    for comparison in comparisons(run.config, run.feed.device):
        result = compare(comparison, run.feed, ranks=run.ranks, stop=run.stop)
        if result is None:
            return None
        results.append(result)
        verdict = Text("holds: ", "green") if result.has_passed else Text("FAILS: ", "bold red")
        run.console.print(verdict.append(summaries.parity_line(result), "none"), soft_wrap=True)
    return results


def _train(run: Run, parity: list[ParityResult]) -> int:
    """Train, then say what came of it; returns the exit code."""
    learner = build_learner(run.config, run.feed.device)
    checkpoints = Checkpoints(run.config.run, run.ranks)
    num_done = checkpoints.resume(learner)
    if num_done >= run.config.run.steps:
        run.console.print(f"Nothing is left to train: {num_done} steps are done.")
        return 0
    num_parameters = sum(parameter.numel() for parameter in learner.model.parameters())
    _announce(run, num_parameters, num_done)
    reset_peak(run.feed.device)
    with (
        MetricsFile(run.folder, is_resumed=num_done > 0) as metrics,
        TrainingProgress(run.console, steps=run.config.run.steps) as progress,
    ):
        for result in parity:
            metrics.write("parity", result)
        history = train(
            learner,
            run.feed,
            run.config.run,
            ranks=run.ranks,
            stop=run.stop,
            journal=Journal(metrics=metrics, progress=progress),
            checkpoints=checkpoints,
        )
    summary = summaries.Summary(
        config=run.config,
        world_size=run.ranks.world_size,
        num_parameters=num_parameters,
        corpus=_describe(run.feed.corpus),
        history=history,
        memory=_memory(run, history, learner),
        tiers=_tiers(run, learner),
        peak_bytes=_peaks(run),
        parity=parity,
        sample=None if history.stop_signal else _sample(run, learner),
    )
    _report(run, summary)
    return exit_code(history.stop_signal) if history.stop_signal else 0


def _announce(run: Run, num_parameters: int, num_done: int) -> None:
    """Say what is about to be trained."""
    shard = run.config.shard
    run.console.rule("training", align="left")
    run.console.print(
        f"{num_parameters:,} parameters ({run.config.model}), {run.ranks.world_size} rank(s), "
        f"stage {shard.stage}, {shard.precision}, {run.feed.step_tokens:,} tokens a step\n"
        f"{_describe(run.feed.corpus)}",
        highlight=False,
    )
    if num_done:
        run.console.print(f"continues after step {num_done}", highlight=False)


def _describe(corpus: Corpus) -> str:
    """Say what text it is."""
    size = (len(corpus.training) + len(corpus.validation)) / 2**20
    return f"{corpus.source}: {corpus.num_documents:,} files, {size:.1f} MiB"


def _memory(run: Run, history: History, learner: Learner) -> list[MemoryRow]:
    """Gather what the ranks hold; empty where no update was made. Collective."""
    held, shard = history.held, run.config.shard
    choice = offload(shard)
    if held is None or isinstance(choice, AdaptiveOffload):
        return []
    mine = [float(getattr(held, category)) for category in (*CATEGORIES, *ELSEWHERE)]
    numel = sum(parameter.numel() for parameter in learner.model.parameters())
    buffer_bytes = sum(buffer.nbytes for buffer in learner.model.buffers())
    expected = closed_form(
        numel,
        stage=shard.stage,
        shard_size=shard.shard_size or run.ranks.world_size,
        mixed_precision=mixed_precision(shard.precision),
        buffer_bytes=buffer_bytes,
        offload=choice,
    )
    plain = closed_form(numel, stage=0, shard_size=run.ranks.world_size, buffer_bytes=buffer_bytes)
    everyone = run.ranks.gather(mine, device=run.feed.device)
    return memory_rows(everyone, expected=expected, plain=plain)


def _tiers(run: Run, learner: Learner) -> list[TierRow]:
    """Gather what the tiers of a run with budgets hold and have held; collective."""
    if not isinstance(offload(run.config.shard), AdaptiveOffload):
        return []
    report, mine = tiers.numbers(learner.model)
    return tiers.tier_rows(report, run.ranks.gather(mine, device=run.feed.device))


def _peaks(run: Run) -> list[int]:
    """Gather the peak memory of the ranks; collective."""
    device = run.feed.device
    return [int(row[0]) for row in run.ranks.gather([float(peak_bytes(device))], device=device)]


def _sample(run: Run, learner: Learner) -> Sample | None:
    """Let the model write, if asked to and if it fits the budget whole; collective."""
    if run.config.run.sample_bytes == 0:
        return None
    try:
        return write_sample(
            learner.model,
            run.feed.corpus,
            length=run.config.run.sample_bytes,
            seed=run.config.run.seed,
            is_writer=run.ranks.is_first,
        )
    except BudgetError:  # on all ranks alike
        run.console.print("no sample: the accelerator's budget has no room for the whole model")
        return None


def _report(run: Run, summary: summaries.Summary) -> None:
    """Print the sample, the table and the short report, and write them down."""
    if summary.sample is not None:
        run.console.rule("sample", align="left")
        run.console.print(Text(summary.sample.prompt, "dim") + Text(summary.sample.text, "not dim"))
    if summary.memory:
        run.console.rule("memory", align="left")
        shard = run.config.shard
        title = f"stage {shard.stage}, {shard.precision}, {summary.world_size} rank(s)"
        run.console.print(memory_table(summary.memory, title=title))
    if summary.tiers:
        run.console.rule("memory", align="left")
        shard = run.config.shard
        title = f"stage {shard.stage}, {shard.precision}, {summary.world_size} rank(s)"
        run.console.print(tiers.tier_table(summary.tiers, title=title))
        state = summaries.state_line(summary)
        run.console.print(state, highlight=False)
    stopped_by = summary.history.stop_signal
    run.console.rule(f"stopped by {name_of(stopped_by)}" if stopped_by else "done", align="left")
    for name, text in summaries.facts(summary):
        run.console.print(f"{name:<16} {text}", highlight=False)
    if run.folder is not None:
        summaries.write(run.folder, summary)
        run.console.print(
            f"{'metrics':<16} {run.folder / METRICS_NAME}, report in {run.folder / 'report.md'}",
            highlight=False,
            soft_wrap=True,
        )
