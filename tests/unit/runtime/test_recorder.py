"""What is recorded of a step has an end, whether or not the step has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import torch

from shardwise.residency import ChunkBytes, Segment
from shardwise.runtime import recorder
from shardwise.runtime.meter import Meter

if TYPE_CHECKING:
    import pytest

    from shardwise.runtime.chunk import Chunk


def test_forward_passes_that_no_step_follows_do_not_pile_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in an evaluation that forgot ``no_grad``: the last ones are kept."""
    monkeypatch.setattr(recorder, "_LONGEST_STEP", 10)
    chunks = [cast("Chunk", SimpleNamespace(index=index)) for index in range(4)]
    recording = recorder.Recorder(Meter(torch.device("cpu")))
    for _ in range(100):
        recording.note(chunks, Segment.FORWARD)
    recording.end_step([ChunkBytes(whole_bytes=4)] * 4)
    assert recording.trace is not None
    assert [moment.chunk for moment in recording.trace.moments] == [2, 3, 0, 1, 2, 3, 0, 1, 2, 3]
    recording.note(chunks, Segment.FORWARD)
    recording.end_step([ChunkBytes(whole_bytes=4)] * 4)
    assert len(recording.trace.moments) == 4
