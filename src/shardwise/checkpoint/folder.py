"""A checkpoint as a folder: written in hiding, published by one rename, found again, thrown away.

Names beside a checkpoint ``c``, each with a random token that tells jobs apart::

    .c.<token>.lock     locked for as long as its writer lives
    .c.<token>.partial  being written, or what it has replaced: worthless without its writer
    .c.<token>.old      the checkpoint itself, between two renames on systems without exchange
    .c.<token>.trash    about to be removed

One process calls this: the first rank.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from shardwise.checkpoint import disk
from shardwise.checkpoint.index import INDEX
from shardwise.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    check_file,
    check_length,
    read_manifest,
)
from shardwise.errors import CheckpointError, mismatch

logger = logging.getLogger(__name__)

_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?P<token>[0-9a-f]{16})\.(?P<kind>partial|old|trash|lock)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A checkpoint that is being written."""

    target: Path
    token: str

    def beside(self, kind: str) -> Path:
        """Return one of the hidden names."""
        return self.target.parent / f".{self.target.name}.{self.token}.{kind}"

    @property
    def folder(self) -> Path:
        """Where its files are written."""
        return self.beside("partial")


class Writing:
    """The lock on a draft, from its beginning until it is published or given up."""

    def __init__(self, target: Path) -> None:
        """Remove what dead writers left, and make the hidden folder.

        Raises:
            CheckpointError: The target holds something that is no checkpoint.
        """
        refuse_other_things(target)
        disk.make_parents(target.parent)
        sweep(target.parent)
        self._lock: int | None
        self.draft, self._lock = _lock_new(target)
        try:
            disk.make_folder(self.draft.folder)
        except OSError:
            self.close()
            raise

    def publish(self) -> None:
        """Make the draft the checkpoint, at once, in place of one that is there."""
        draft, target = self.draft, self.draft.target
        disk.flush_folder(draft.folder)
        if not target.exists():
            disk.rename(draft.folder, target)
        elif not disk.exchange(draft.folder, target):
            old = draft.beside("old")
            disk.rename(target, old)
            try:
                disk.rename(draft.folder, target)
            except OSError:
                disk.rename(old, target)
                raise
            disk.flush_folder(target.parent)
            disk.remove_folder(old)
        disk.flush_folder(target.parent)

    def close(self) -> None:
        """Remove what is left of the draft, or was replaced by it, and the lock; once will do."""
        if self._lock is None:
            return
        lock, self._lock = self._lock, None
        try:
            disk.remove_folder(self.draft.folder)
            disk.remove_file(self.draft.beside("lock"))
        finally:
            os.close(lock)


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Return the newest checkpoint in a directory that is complete and undamaged, None without one.

    Damaged ones are skipped with a warning that names the file. Every file of the one that is
    returned has been read and compared with its hash.

    Args:
        directory: The parent of checkpoints that ``save`` wrote.

    Raises:
        CheckpointError: It is a checkpoint itself, or a file.

    Collectives: none; call it on every rank.

    Example:
        >>> import shardwise as sw
        >>> sw.latest("no/such/directory") is None
        True
    """
    parent = Path(directory)
    if parent.is_file() or (parent / MANIFEST).exists():
        got = "a file" if parent.is_file() else "one of them"
        raise CheckpointError(
            mismatch(
                "latest",
                expected="the directory that checkpoints are in",
                got=f"{got}, {parent}",
                fix="pass the directory above",
            )
        )
    for folder, manifest in reversed(_find(parent)):
        try:
            for name, wanted in manifest.files.items():
                check_file(folder / name, wanted)
        except (CheckpointError, OSError) as error:
            logger.warning("checkpoint skipped: %s", error)
            continue
        return folder
    return None


def next_time_ns(parent: Path) -> int:
    """Return the present, or what comes after the newest checkpoint, should its clock be ahead."""
    newest = [manifest.saved_ns for _, manifest in _find(parent)[-1:]]
    return max([time.time_ns(), *(saved_ns + 1 for saved_ns in newest)])


def retain(parent: Path, num_kept: int) -> None:
    """Remove complete checkpoints except the newest ones."""
    found = [folder for folder, _ in _find(parent) if _LEFTOVER.fullmatch(folder.name) is None]
    for folder in found[:-num_kept]:
        trash = Draft(target=folder, token=secrets.token_hex(8)).beside("trash")
        disk.rename(folder, trash)
        disk.remove_folder(trash)


def sweep(parent: Path) -> None:
    """Remove what writers left that are no longer alive, and give an old checkpoint its name back.

    What a living writer works on is recognised by its lock; without locks nothing is removed.
    """
    leftovers: dict[str, list[tuple[str, Path]]] = {}
    for path in parent.iterdir():
        match = _LEFTOVER.fullmatch(path.name)
        if match is not None:
            own = leftovers.setdefault(match["token"], [])
            own.append((match["kind"], path.with_name(match["name"])))
    for token, own in leftovers.items():
        draft = Draft(target=own[0][1], token=token)
        lock = draft.beside("lock")
        descriptor = os.open(lock, os.O_RDWR) if lock.exists() else None
        try:
            if descriptor is None or disk.lock(descriptor):
                _remove(draft, own)
        finally:
            if descriptor is not None:
                os.close(descriptor)


def _remove(draft: Draft, own: list[tuple[str, Path]]) -> None:
    """Remove what is left of a dead writer, the lock last."""
    for kind, target in own:
        path = draft.beside(kind)
        if kind == "old" and not target.exists():
            disk.rename(path, target)
        elif kind != "lock":
            disk.remove_folder(path)
    disk.remove_file(draft.beside("lock"))


def _lock_new(target: Path) -> tuple[Draft, int]:
    """Return a draft and its lock, which another writer's sweep may have taken for a leftover."""
    while True:
        draft = Draft(target=target, token=secrets.token_hex(8))
        lock = draft.beside("lock")
        descriptor = disk.create(lock)
        if disk.lock(descriptor) is not False and lock.exists():
            return draft, descriptor
        os.close(descriptor)


def _find(directory: Path) -> list[tuple[Path, Manifest]]:
    """Return folders whose files are all there in full length, the oldest first."""
    found: list[tuple[Path, Manifest]] = []
    if not directory.is_dir():
        return found
    for folder in directory.iterdir():
        match = _LEFTOVER.fullmatch(folder.name)
        if match is not None and (match["kind"] != "old" or _is_named(folder, match["name"])):
            continue
        if not (folder / MANIFEST).exists():
            continue
        try:
            manifest = read_manifest(folder)
            for name, wanted in manifest.files.items():
                check_length(folder / name, wanted)
        except (CheckpointError, OSError) as error:
            logger.warning("checkpoint skipped: %s", error)
            continue
        found.append((folder, manifest))
    return sorted(found, key=lambda one: (one[1].saved_ns, one[0].name))


def _is_named(old: Path, name: str) -> bool:
    """Return whether what has replaced an old checkpoint is in place."""
    return old.with_name(name).exists()


def refuse_other_things(target: Path) -> None:
    """Refuse to replace what is no checkpoint.

    Raises:
        CheckpointError: The target holds something else.
    """
    if not target.exists():
        return
    is_checkpoint = (target / MANIFEST).exists() or (target / INDEX).exists()
    if not target.is_dir() or (not is_checkpoint and any(target.iterdir())):
        raise CheckpointError(
            mismatch(
                f"path {target}",
                expected="a new name, an empty folder or an earlier checkpoint",
                got="other files" if target.is_dir() else "a file",
                fix="choose another path: it would be replaced",
            )
        )
