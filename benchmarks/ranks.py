"""The processes of one contestant, seen from the driver."""

from __future__ import annotations

import os
import uuid
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.multiprocessing as mp

from benchmarks.gpt import SIZES, GPTConfig
from benchmarks.rank import RankSpec, run_rank

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess
    from pathlib import Path

    from benchmarks.contestants import Contestant, Dtype

WORLD_SIZE = 2
_ANSWER_TIMEOUT_S = 600

_FRESH = mp.get_context("spawn")
_FORKED = mp.get_context("forkserver")


class Ranks:
    """A contestant's ranks: alive from construction to `close`, idle between orders."""

    def __init__(
        self, specs: list[RankSpec], environment: Mapping[str, str], *, is_toy: bool
    ) -> None:
        """Start one process per spec, with one thread each.

        What is measured runs in fresh interpreters, which share no pages. A toy may be forked from
        a server, which is quick where one runs already, and takes the server's environment.
        """
        context = _FORKED if is_toy else _FRESH
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        with _changed_environment({"OMP_NUM_THREADS": "1", **environment}):
            for spec in specs:
                ours, theirs = context.Pipe()
                process = context.Process(target=run_rank, args=(spec, theirs), daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)

    def ask(self, order: object) -> list[Any]:
        """Give every rank the order and return their answers in rank order.

        Raises:
            RuntimeError: When a rank failed, with its traceback.
        """
        for connection in self._connections:
            connection.send(order)
        answers = []
        for rank, connection in enumerate(self._connections):
            if not connection.poll(_ANSWER_TIMEOUT_S):
                message = f"rank {rank} gave no answer within {_ANSWER_TIMEOUT_S} s"
                raise RuntimeError(message)
            try:
                answer = connection.recv()
            except EOFError:
                answer = f"died with exit code {self._processes[rank].exitcode}"
            if isinstance(answer, str):
                message = f"rank {rank}: {answer}"
                raise RuntimeError(message)
            answers.append(answer)
        return answers

    def close(self) -> None:
        """Let the ranks end, then make sure of it."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(10)
            process.kill()
            process.join()


@contextmanager
def start_ranks(
    contestant: Contestant,
    config: GPTConfig,
    *,
    dtype: Dtype,
    chunk_bytes: int | None,
    folder: Path,
    environment: Mapping[str, str],
) -> Generator[Ranks]:
    """Hold a contestant's ranks."""
    store = folder / uuid.uuid4().hex
    specs = [
        RankSpec(
            contestant=contestant,
            config=config,
            dtype=dtype,
            chunk_bytes=chunk_bytes,
            rank=rank,
            world_size=WORLD_SIZE,
            store=store,
        )
        for rank in range(WORLD_SIZE)
    ]
    ranks = Ranks(specs, environment, is_toy=config == SIZES["tiny"])
    try:
        yield ranks
    finally:
        ranks.close()


@contextmanager
def _changed_environment(changes: Mapping[str, str]) -> Generator[None]:
    """Change the environment that new processes get."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
