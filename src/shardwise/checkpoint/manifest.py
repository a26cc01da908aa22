"""The list of a checkpoint's files with lengths and hashes, and the check against it.

A manifest finds damage: a torn write, a lost file, a flipped byte. It is no signature; that nothing
in a checkpoint runs as code does not depend on it.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from shardwise.checkpoint.hashes import BLOCK_BYTES, SHA256, XXH3, FileSum, first_wrong
from shardwise.errors import CheckpointError, mismatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

MANIFEST = "manifest.json"
_FORMAT = "shardwise checkpoint"
_OLDER, _VERSION = 1, 2
_SELF = "sha256"
"""Under this name the manifest hashes itself, in all versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One checkpoint's files."""

    world_size: int
    """Ranks that wrote it."""
    saved_ns: int
    """When, in nanoseconds since 1970; later than any other checkpoint of the folder."""
    files: dict[str, FileSum]
    """By name inside the folder."""
    version: int = _VERSION
    """Version 1 has one SHA-256 for each file."""

    def to_bytes(self) -> bytes:
        """Return the file: JSON with a hash of itself."""
        body: dict[str, Any] = {
            "format": _FORMAT,
            "version": self.version,
            "world_size": self.world_size,
            "saved_ns": self.saved_ns,
        }
        if self.version == _OLDER:
            body["files"] = {
                name: {"length_bytes": one.length_bytes, SHA256: one.hashes[0]}
                for name, one in self.files.items()
            }
        else:
            body |= {"hash": XXH3, "block_bytes": BLOCK_BYTES}
            body["files"] = {
                name: {"length_bytes": one.length_bytes, "hashes": list(one.hashes)}
                for name, one in self.files.items()
            }
        return (json.dumps({**body, _SELF: _hash_of(body)}, indent=1) + "\n").encode()


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder.

    Raises:
        CheckpointError: It is missing, damaged or of a newer version.
    """
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
        body = json.loads(data)
        version = body["version"]
        is_known = version in (_OLDER, _VERSION)
        read = _read_older if version == _OLDER else _read_sum
        manifest = Manifest(
            world_size=body["world_size"],
            saved_ns=body["saved_ns"],
            files={name: read(entry) for name, entry in body["files"].items()} if is_known else {},
            version=version,
        )
        is_whole = is_known and data == manifest.to_bytes()
        for name in manifest.files:
            if PurePath(name).name != name:
                raise ValueError("a file outside of the folder")
    except FileNotFoundError as error:
        raise _damaged(path, "to be there", "no such file") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(path, "a manifest", "a damaged one") from error
    if not is_known:
        raise CheckpointError(
            mismatch(
                str(path),
                expected=f"version {_VERSION}",
                got=f"version {version!r}",
                fix="load it with the release that wrote it",
            )
        )
    if not is_whole:
        raise _damaged(path, "a manifest that matches its own hash", "a damaged one")
    return manifest


def _read_sum(entry: dict[str, Any]) -> FileSum:
    """Return what one file must be."""
    length_bytes, hashes = entry["length_bytes"], tuple(map(str, entry["hashes"]))
    if len(hashes) != -(-length_bytes // BLOCK_BYTES):
        raise ValueError("another number of blocks than the length says")
    return FileSum(length_bytes=length_bytes, hashes=hashes)


def _read_older(entry: dict[str, Any]) -> FileSum:
    """Return what one file must be, as version 1 says it."""
    length_bytes = entry["length_bytes"]
    return FileSum(
        length_bytes=length_bytes,
        hashes=(entry[SHA256],),
        kind=SHA256,
        block_bytes=max(1, length_bytes),
    )


def share_of(files: Mapping[str, FileSum], index: int, total: int) -> dict[str, list[int]]:
    """Return which blocks of which files one of several checkers takes.

    Blocks are dealt out in the order of the files' names, in runs of equal length: at the world
    size that wrote a checkpoint a rank checks, up to a block or two, the file that it reads.
    """
    blocks = [
        (name, number, end - start)
        for name in sorted(files, key=_in_order_of_numbers)
        for number in range(len(files[name].hashes))
        for start, end in [files[name].span(number)]
    ]
    total_bytes = sum(length for *_, length in blocks)
    taken: dict[str, list[int]] = {}
    done_bytes = 0
    for name, number, length in blocks:
        middle = done_bytes + length / 2
        if min(total - 1, int(middle * total / max(1, total_bytes))) == index:
            taken.setdefault(name, []).append(number)
        done_bytes += length
    return taken


def _in_order_of_numbers(name: str) -> tuple[int, str]:
    """Return a key by which the files of ranks are in the order of ranks, before all others."""
    number = name.removeprefix("__").partition("_")[0]
    is_of_rank = name.startswith("__") and number.isdigit()
    return (int(number) if is_of_rank else 2**63, name)


def check_length(path: Path, wanted: FileSum) -> None:
    """Refuse a file that is missing or of another length."""
    try:
        length_bytes = path.stat().st_size
    except FileNotFoundError as error:
        raise _damaged(path, f"{wanted.length_bytes} bytes", "no such file") from error
    if length_bytes != wanted.length_bytes:
        raise _damaged(path, f"{wanted.length_bytes} bytes", f"{length_bytes} bytes")


def check_file(path: Path, wanted: FileSum, blocks: Iterable[int] | None = None) -> None:
    """Refuse a file that is not byte for byte what was written.

    Args:
        path: The file.
        wanted: What it must be.
        blocks: Numbers of the blocks to read; None reads all of it.
    """
    check_length(path, wanted)
    numbers = range(len(wanted.hashes)) if blocks is None else blocks
    try:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            wrong = first_wrong(descriptor, wanted, numbers)
        finally:
            os.close(descriptor)
    except OSError as error:  # a read that fails does not say of which file
        raise _damaged(path, "to be readable", error.strerror or error) from error
    if wrong is not None:
        start, end = wanted.span(wrong)
        expected = f"the content with hash {wanted.hashes[wrong][:12]}... in bytes {start} to {end}"
        raise _damaged(path, expected, "other content")


def _hash_of(body: dict[str, object]) -> str:
    """Return the hash of a manifest without its own."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _damaged(path: Path, expected: str, got: object) -> CheckpointError:
    """Return the error that names a damaged file."""
    return CheckpointError(
        mismatch(
            f"checkpoint file {path}",
            expected=expected,
            got=got,
            fix="load an earlier checkpoint, such as shardwise.latest finds",
        )
    )
