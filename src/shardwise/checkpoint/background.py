"""Write a checkpoint while training goes on: one thread, with process groups of its own.

The state is copied to the host first (*staged*); what happens to the original afterwards does not
matter. One save at a time: the next one waits for it, or is refused.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from shardwise.checkpoint.staging import Staging
from shardwise.errors import CheckpointError, mismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    from shardwise.checkpoint.ranks import Ranks
    from shardwise.runtime.engine import Engine


logger = logging.getLogger(__name__)


class PendingSave:
    """A save that may still be writing."""

    def __init__(self, future: Future[None], staged_bytes: int) -> None:
        """Stand for a job that was started."""
        self._future = future
        self.staged_bytes = staged_bytes
        """Bytes of this rank's copy of the state. The memory is kept for the next such save."""
        self.is_told = False
        """``wait`` has raised its error on this rank."""

    @property
    def is_done(self) -> bool:
        """True once the checkpoint is published, or has failed."""
        return self._future.done()

    def wait(self) -> None:
        """Return when the checkpoint is published.

        Raises:
            CheckpointError: It could not be; nothing was changed.
        """
        try:
            self._future.result()
        except Exception:
            self.is_told = True
            raise
        finally:  # an interrupt ends the wait, not the save
            if self.is_done:
                _unfinished.discard(self)


class Background:
    """The saves of one engine that run beside training."""

    def __init__(self, ranks: Ranks) -> None:
        """Make groups that training does not use. Collectives: one new group per axis."""
        self.ranks = ranks.apart()
        """The same ranks, on groups of their own."""
        self.staging = Staging()
        """Free to be used once the save before has settled."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="shardwise-save")
        self._pending: PendingSave | None = None

    @classmethod
    def of(cls, engine: Engine) -> Background | None:
        """Return what an engine has, None before its first asynchronous save."""
        return engine.companions.get(cls)

    @classmethod
    def make(cls, engine: Engine, ranks: Ranks) -> Background:
        """Return what an engine has; make it where it has none. Collectives: see the class."""
        found = cls.of(engine)
        if found is None:
            found = engine.companions[cls] = cls(ranks)
        return found

    def start(self, job: Callable[[], None], staged_bytes: int) -> PendingSave:
        """Run a job beside training."""
        self._pending = PendingSave(self._executor.submit(job), staged_bytes)
        _unfinished.add(self._pending)
        return self._pending

    def settle(self, ranks: Ranks, *, refuses: bool = False) -> None:
        """Wait for the save that is under way, or refuse to.

        Raises:
            CheckpointError: On all ranks: it has failed, which some rank was not told of yet; or it
                still runs on one and ``refuses``.

        Collectives: one exchange with ``refuses``, and one where it has failed.
        """
        if self._pending is None:
            return
        if refuses and not all(ranks.gather(self._pending.is_done)):
            raise CheckpointError(
                mismatch(
                    "save",
                    expected="no other save under way",
                    got="one that still writes",
                    fix="save later, or pass async_='wait'",
                )
            )
        pending = self._pending
        was_told = pending.is_told
        try:
            pending.wait()
        except Exception:
            if not all(ranks.gather(was_told)):
                raise
        finally:  # after an interrupt it still writes what is staged
            if pending.is_done:
                self._pending = None


_unfinished: set[PendingSave] = set()
"""Saves that nobody has waited for, also of models that are gone: the last of a run is one."""


def _finish_at_exit() -> None:
    """Let saves end with the process instead of being lost, and say which was."""
    for pending in list(_unfinished):
        try:
            pending.wait()
        except Exception:
            logger.exception("a checkpoint was not written: its save had not ended at exit")


# Before the threads of executors end, which a save needs: what was registered last runs first.
threading._register_atexit(_finish_at_exit)  # type: ignore[attr-defined]


def settle_all(engines: Sequence[Engine], ranks: Ranks, *, refuses: bool = False) -> None:
    """Wait for saves of these engines that are under way, or refuse to. See ``settle``."""
    for engine in engines:
        background = Background.of(engine)
        if background is not None:
            background.settle(ranks, refuses=refuses)
