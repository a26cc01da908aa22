"""Real text as bytes: where it is found, how it is split, which samples a rank sees at a step.

A token is a byte, so the vocabulary is 256 and nothing is downloaded or trained. The order of
documents, the split and every batch are functions of the text, the seed, the step and the world
size alone: the batches of N ranks, joined in rank order, are the batch of one process that takes N
times as many samples.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardwise.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

SEPARATOR = b"\n\0\n"
"""Between documents: a byte that no text file holds, so that the model can learn where one ends."""

_NOT_THE_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Samples of one micro-batch on one rank; ``targets`` is ``inputs`` moved on by one byte."""

    inputs: Tensor  # [samples, sequence], int64
    targets: Tensor  # [samples, sequence], int64


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """Text in two parts, as bytes."""

    training: Tensor  # [bytes], uint8
    validation: Tensor  # [bytes], uint8
    num_documents: int
    source: str
    """What the text is, for people."""

    def batch(
        self, *, seed: int, step: int, part: int, parts: int, sequence: int, samples: int
    ) -> Batch:
        """Return the samples of one part of the joined batch of a step.

        Args:
            seed: The run's seed.
            step: Step, from 0.
            part: Which part of the joined batch: micro-batch times world size plus rank.
            parts: In how many parts the joined batch is cut: micro-batches times world size.
            sequence: Bytes per sample.
            samples: Samples per part.

        Returns:
            The part's samples; joined over all parts in order they are the batch of one part with
            ``parts * samples`` samples.
        """
        generator = torch.Generator().manual_seed(_mix(seed, step))
        last_start = len(self.training) - sequence
        starts = torch.randint(last_start, (parts * samples,), generator=generator)
        return _windows(self.training, starts[part * samples : (part + 1) * samples], sequence)

    def validation_batch(self, *, first: int, samples: int, total: int, sequence: int) -> Batch:
        """Return samples ``first``, ``first + 1``, ... of ``total`` evenly spaced ones.

        The last ones are repeated where ``first + samples`` goes beyond ``total``, so that every
        rank runs the model equally often; the caller counts only the real ones.
        """
        indices = torch.arange(first, first + samples).clamp(max=total - 1)
        last_start = len(self.validation) - sequence - 1
        starts = indices * last_start // max(total - 1, 1)
        return _windows(self.validation, starts, sequence)


def load_corpus(
    path: str | None, *, sequence: int, limit_bytes: int, validation_fraction: float
) -> Corpus:
    """Read the text and split it; the end of the text, by order of documents, is for validation.

    Documents come in the order of a hash of their relative path: fixed on every machine, and mixed,
    so that the split and the limit take a fair sample of a folder. A single file is cut at its end.

    Raises:
        ConfigurationError: There is no such text, or a sample does not fit into a part of it.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if path is None else Path(path)
    source = "source of the Python standard library" if path is None else path
    if not root.exists():
        raise ConfigurationError(
            f"--data expected a text file or a folder but got {root}: not found."
        )
    files = _documents(root, only_library=path is None)
    text, num_documents = _read(files, limit_bytes)
    if num_documents == 0:
        raise ConfigurationError(
            f"--data expected text but found none in {root}; name a text file, or a folder of them."
        )
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    cut = len(tokens) - max(1, int(len(tokens) * validation_fraction))
    corpus = Corpus(
        training=tokens[:cut], validation=tokens[cut:], num_documents=num_documents, source=source
    )
    for name, part in (("training", corpus.training), ("validation", corpus.validation)):
        if len(part) < sequence + 1:
            raise ConfigurationError(
                f"--sequence expected at most {max(len(part) - 1, 0)} bytes but got {sequence} "
                f"(the {name} part of {source} has {len(part)} bytes); "
                "take a shorter sequence or more text."
            )
    return corpus


def _documents(root: Path, *, only_library: bool) -> list[Path]:
    """List the files in a fixed, mixed order; of the library, its own modules only."""
    if root.is_file():
        return [root]
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if only_library:
            folders[:] = [name for name in folders if name not in _NOT_THE_LIBRARY]
            names = [name for name in names if name.endswith(".py")]
        found += [Path(folder, name) for name in names if not name.startswith(".")]
    return sorted(found, key=lambda file: _digest(file.relative_to(root).as_posix()))


def _read(files: list[Path], limit_bytes: int) -> tuple[bytes, int]:
    """Join the documents up to the limit; a file with a NUL byte is no text and is left out."""
    parts: list[bytes] = []
    size_bytes = num_documents = 0
    for document in _texts(files):
        if size_bytes >= limit_bytes:
            break
        parts.append(document)
        size_bytes += len(document)
        num_documents += 1
    return b"".join(parts)[:limit_bytes], num_documents


def _texts(files: list[Path]) -> Iterator[bytes]:
    """Yield the content of each readable, non-empty text file, with the separator behind it."""
    for file in files:
        try:
            content = file.read_bytes()
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise ConfigurationError(f"--data could not read {file}: {reason}.") from None
        if content and b"\0" not in content:
            yield content + SEPARATOR


def _windows(tokens: Tensor, starts: Tensor, sequence: int) -> Batch:
    """Cut one sample of ``sequence`` bytes, and the byte behind it, at each start."""
    window = starts[:, None] + torch.arange(sequence + 1)  # [samples, sequence + 1]
    text = tokens[window].long()
    return Batch(inputs=text[:, :-1].contiguous(), targets=text[:, 1:].contiguous())


def _mix(seed: int, step: int) -> int:
    """A 63-bit seed from two numbers, without the patterns of their sum."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{step}".encode()).digest()[:8], "big") >> 1


def _digest(name: str) -> bytes:
    """The key of the mixed order."""
    return hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()
