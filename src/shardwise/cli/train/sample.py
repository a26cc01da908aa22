"""Text written by the trained model, after a few bytes that it was never trained on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import shardwise as sw

if TYPE_CHECKING:
    from shardwise.cli.train.corpus import Corpus
    from shardwise.cli.train.model import GPT

PROMPT_BYTES = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A prompt and what the model wrote after it."""

    prompt: str
    text: str


def write_sample(
    model: GPT, corpus: Corpus, *, length: int, seed: int, is_writer: bool
) -> Sample | None:
    """Let the model write; collective, on all ranks, though only the writer computes.

    Args:
        model: The sharded model.
        corpus: Its validation part gives the prompt: what follows its first blank line.
        length: Bytes to write.
        seed: Seeds the choice of bytes.
        is_writer: Whether this rank computes.

    Returns:
        The sample on the writer, None elsewhere.
    """
    validation = bytes(corpus.validation[:4096].tolist())
    start = validation.find(b"\n\n") + 1
    prompt = validation[start : start + PROMPT_BYTES].lstrip(b"\n") or validation[:PROMPT_BYTES]
    with sw.full_parameters(model):
        if not is_writer:
            return None
        text = model.generate(prompt, length=length, seed=seed)
    return Sample(prompt=readable(prompt), text=readable(text))


def readable(text: bytes) -> str:
    """Decode for a terminal; other control characters than line breaks and tabs become dots."""
    decoded = text.decode("utf-8", errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{MIDDLE DOT}" for c in decoded)
