"""The list of a checkpoint's files with lengths and hashes, and the check against it.

A manifest finds damage: a torn write, a lost file, a flipped byte. It is no signature; that nothing
in a checkpoint runs as code does not depend on it.
"""

from __future__ import annotations

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from shardwise.errors import CheckpointError, mismatch

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = "manifest.json"
_FORMAT = "shardwise checkpoint"
_VERSION = 1
_BLOCK_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSum:
    """What one file must be."""

    length_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One checkpoint's files."""

    world_size: int
    """Ranks that wrote it."""
    saved_ns: int
    """When, in nanoseconds since 1970; later than any other checkpoint of the folder."""
    files: dict[str, FileSum]
    """By name inside the folder."""

    def to_bytes(self) -> bytes:
        """Return the file: JSON with a hash of itself."""
        body = {"format": _FORMAT, "version": _VERSION, **asdict(self)}
        return (json.dumps({**body, "sha256": _hash_of(body)}, indent=1) + "\n").encode()


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
        files = {name: FileSum(**entry) for name, entry in body["files"].items()}
        manifest = Manifest(world_size=body["world_size"], saved_ns=body["saved_ns"], files=files)
    except FileNotFoundError as error:
        raise _damaged(path, "to be there", "no such file") from error
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(path, "a manifest", "a damaged one") from error
    if version != _VERSION:
        raise CheckpointError(
            mismatch(
                str(path),
                expected=f"version {_VERSION}",
                got=f"version {version!r}",
                fix="load it with the release that wrote it",
            )
        )
    if data != manifest.to_bytes():
        raise _damaged(path, "a manifest that matches its own hash", "a damaged one")
    return manifest


def check_length(path: Path, wanted: FileSum) -> None:
    """Refuse a file that is missing or of another length."""
    try:
        length_bytes = path.stat().st_size
    except FileNotFoundError as error:
        raise _damaged(path, f"{wanted.length_bytes} bytes", "no such file") from error
    if length_bytes != wanted.length_bytes:
        raise _damaged(path, f"{wanted.length_bytes} bytes", f"{length_bytes} bytes")


def check_file(path: Path, wanted: FileSum) -> None:
    """Refuse a file that is not byte for byte what was written."""
    check_length(path, wanted)
    digest = hashlib.sha256()
    blocks = [bytearray(_BLOCK_BYTES) for _ in range(2)]
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(max_workers=1) as reader:
        coming = reader.submit(file.readinto, blocks[0])
        while length := coming.result():
            full = memoryview(blocks[0])[:length]
            blocks.reverse()
            coming = reader.submit(file.readinto, blocks[0])  # meanwhile
            digest.update(full)
    if digest.hexdigest() != wanted.sha256:
        raise _damaged(path, f"the content with hash {wanted.sha256[:12]}...", "other content")


def _hash_of(body: dict[str, object]) -> str:
    """Return the hash of a manifest without its own."""
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _damaged(path: Path, expected: str, got: str) -> CheckpointError:
    """Return the error that names a damaged file."""
    return CheckpointError(
        mismatch(
            f"checkpoint file {path}",
            expected=expected,
            got=got,
            fix="load an earlier checkpoint, such as shardwise.latest finds",
        )
    )
