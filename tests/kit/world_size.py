"""``@pytest.mark.world_size(2, 4)``: run a test function once per rank, each rank a fresh process.

A forkserver imports torch once, so a rank starts in a fraction of a second. Whatever happens to a
rank - it raises, dies, hangs or skips - is the outcome of the test, told with that rank's own
traceback, and no rank outlives its test. Ranks talk over gloo; they are not given a device.
"""

from __future__ import annotations

import contextlib
import datetime
import enum
import faulthandler
import importlib
import inspect
import os
import signal
import tempfile
import time
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch.multiprocessing as mp

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping
    from multiprocessing.context import ForkServerProcess

_DEFAULT_TIMEOUT_S = 30.0
# Set to anything, state of all that is sharded rests in hostile host memory: scripts/test-hostile.
_OFFLOAD = "SHARDWISE_TEST_OFFLOAD"
# After one rank has failed the others wait in a collective for a partner that will not come.
_GRACE_S = 2.0
# `torch._dynamo` is imported by the first optimizer of a process, which takes seconds.
_PRELOAD = ["pytest", "torch", "torch._dynamo", "torch.distributed", "torch.testing", "shardwise"]

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(_PRELOAD)


class _Kind(enum.Enum):
    """How a rank ended, when it did not pass."""

    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What a rank that did not pass has to say."""

    rank: int
    kind: _Kind
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """Everything a rank needs to know; travels to it by pickle."""

    module: str
    qualname: str
    arguments: Mapping[str, Any]
    world_size: int
    timeout_s: float
    folder: Path
    warning_filters: list[Any]

    def log(self, rank: int) -> Path:
        """Where the rank's stdout, stderr and dumped stacks go."""
        return self.folder / f"rank{rank}.log"


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker."""
    config.addinivalue_line(
        "markers", "world_size(*sizes, timeout_s=30): run the test once per rank, over gloo"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test per world size; a `parametrize` beside it multiplies as usual."""
    marker = metafunc.definition.get_closest_marker("world_size")
    if marker is None:
        return
    if not marker.args or set(marker.kwargs) - {"timeout_s"}:
        message = f"world_size takes sizes and timeout_s, got {marker.args} {marker.kwargs}"
        raise pytest.UsageError(message)
    if "world_size" not in metafunc.fixturenames:
        metafunc.fixturenames.append("world_size")
    metafunc.parametrize("world_size", marker.args, ids=[f"ws{size}" for size in marker.args])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Call a marked test on its ranks instead of here."""
    marker = pyfuncitem.get_closest_marker("world_size")
    if marker is None:
        return None
    function = pyfuncitem.obj
    parameters = cast("dict[str, Any]", pyfuncitem.callspec.params)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = _Job(
            module=function.__module__,
            qualname=function.__qualname__,
            arguments={
                name: pyfuncitem.funcargs[name] for name in inspect.signature(function).parameters
            },
            world_size=parameters["world_size"],
            timeout_s=marker.kwargs.get("timeout_s", _DEFAULT_TIMEOUT_S),
            folder=Path(folder),
            warning_filters=list(warnings.filters),
        )
        outcomes = _run_ranks(job)
        for rank in range(job.world_size):
            if text := _read(job.log(rank)):
                pyfuncitem.add_report_section("call", f"output of rank {rank}", text)
    if not outcomes:
        return True
    if all(outcome.kind is _Kind.SKIPPED for outcome in outcomes):
        pytest.skip(outcomes[0].text)
    pytest.fail("\n".join(f"[rank {o.rank}] {o.text}" for o in outcomes), pytrace=False)


def run_on_ranks(
    function: Callable[..., None],
    arguments: Mapping[str, Any],
    *,
    world_size: int,
    timeout_s: float,
) -> list[str]:
    """Run a function of a module once per rank; return what ranks that did not pass have to say.

    For tests of several jobs, one after the other.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = _Job(
            module=function.__module__,
            qualname=function.__qualname__,
            arguments=arguments,
            world_size=world_size,
            timeout_s=timeout_s,
            folder=Path(folder),
            warning_filters=list(warnings.filters),
        )
        return [f"[rank {o.rank}] {o.text}" for o in _run_ranks(job)]


def _run_ranks(job: _Job) -> list[_Outcome]:
    """Run every rank to its end; return those that did not pass, the first to fail first."""
    processes: list[ForkServerProcess] = []
    connections: dict[Connection, int] = {}
    outcomes: list[_Outcome] = []
    try:
        for rank in range(job.world_size):
            receiver, sender = _context.Pipe(duplex=False)
            process = _context.Process(target=_rank_main, args=(rank, job, sender), daemon=True)
            process.start()
            sender.close()  # so that a rank's death closes the pipe
            processes.append(process)
            connections[receiver] = rank
        deadline_s = time.monotonic() + job.timeout_s
        while connections:
            failed = any(outcome.kind is _Kind.FAILED for outcome in outcomes)
            left_s = deadline_s - time.monotonic()
            ready = wait(list(connections), timeout=min(left_s, _GRACE_S) if failed else left_s)
            if not ready:
                waiting = sorted(connections.values())
                outcomes += [_describe_hang(job, rank, processes[rank]) for rank in waiting]
                break
            for connection in [one for one in connections if one in ready]:
                rank = connections.pop(connection)
                outcome = _receive(job, rank, connection, processes[rank])
                outcomes += [outcome] if outcome else []
    finally:
        for process in processes:
            process.join(0 if outcomes else 5)
            process.kill()
            process.join()
    return outcomes


def _receive(
    job: _Job, rank: int, connection: Connection, process: ForkServerProcess
) -> _Outcome | None:
    """Read a rank's outcome, or find out how it died."""
    with connection:
        try:
            return connection.recv()
        except EOFError:
            process.join()
    text = f"died with exit code {process.exitcode}\n{_read(job.log(rank))}"
    return _Outcome(rank=rank, kind=_Kind.FAILED, text=text)


def _describe_hang(job: _Job, rank: int, process: ForkServerProcess) -> _Outcome:
    """Ask a rank that does not answer for the stacks of its threads."""
    log = job.log(rank)
    length = len(_read(log))
    if process.pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
    end_s = time.monotonic() + 1
    while len(_read(log)) == length and time.monotonic() < end_s:
        time.sleep(0.05)
    time.sleep(0.05)
    text = f"no answer within {job.timeout_s:g} s, was at\n{_read(log)[length:]}"
    return _Outcome(rank=rank, kind=_Kind.FAILED, text=text)


def _read(path: Path) -> str:
    """Return what a rank has written, or nothing when it did not get so far."""
    return path.read_text(errors="replace") if path.exists() else ""


def _rank_main(rank: int, job: _Job, sender: Connection) -> None:
    """Be one rank: run the test inside a process group and send its outcome, None for a pass."""
    outcome, has_passed = None, False
    try:
        with _rank_environment(rank, job):
            _resolve(job.module, job.qualname)(**job.arguments)
            has_passed = True
            sender.send(None)  # before it meets the others, who may hang
    except pytest.skip.Exception as skipped:
        outcome = _Outcome(rank=rank, kind=_Kind.SKIPPED, text=str(skipped))
    except BaseException:  # whatever it is, it is this rank's outcome
        outcome = _Outcome(rank=rank, kind=_Kind.FAILED, text=traceback.format_exc())
    if not has_passed:
        sender.send(outcome)


@contextlib.contextmanager
def _rank_environment(rank: int, job: _Job) -> Generator[None]:
    """Hold what a rank runs in: its output file, warning filters, seed, threads and group."""
    import torch
    import torch.distributed as dist

    with job.log(rank).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    warnings.resetwarnings()
    warnings.filters = job.warning_filters
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = str(job.world_size)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.folder / 'store'}",
        rank=rank,
        world_size=job.world_size,
        # below the test's own limit, so that the rank that waits can say for what it waits
        timeout=datetime.timedelta(seconds=0.8 * job.timeout_s),
    )
    if os.environ.get(_OFFLOAD):
        from tests.kit.offloaded import offload_everything

        offload_everything()
    dist.barrier()  # a rank that ends at once must not leave others half connected
    yield
    with contextlib.suppress(RuntimeError):  # of a rank that has failed, which says so itself
        dist.barrier()  # what this rank has sent last may still be on its way
    dist.destroy_process_group()


def _resolve(module: str, qualname: str) -> Any:
    """Import the test function; a method comes bound to a new instance of its class."""
    target: Any = importlib.import_module(module)
    for name in qualname.split("."):
        target = getattr(target() if isinstance(target, type) else target, name)
    return target
