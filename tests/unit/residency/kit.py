"""Sizes and steps that the tests of residency share."""

from __future__ import annotations

from hypothesis import strategies as st

from shardwise.residency import ChunkBytes, Moment, Pace, Segment, Tier, Trace


def same_size_trace(uses: list[int], *, whole_bytes: int = 1, repeats: bool = False) -> Trace:
    """A pass that uses chunks of one size in the given order."""
    num_chunks = max(uses, default=-1) + 1
    return Trace(
        chunks=(ChunkBytes(whole_bytes=whole_bytes),) * num_chunks,
        moments=tuple(Moment(chunk, Segment.FORWARD) for chunk in uses),
        repeats=repeats,
    )


def training_step(chunks: tuple[ChunkBytes, ...], *, activation_bytes: int = 0) -> Trace:
    """Forward, backward in reverse, and the update of what has gradients."""
    order = list(range(len(chunks)))
    live = [(chunk + 1) * activation_bytes for chunk in order]
    return Trace(
        chunks=chunks,
        moments=(
            *(Moment(chunk, Segment.FORWARD, live[chunk]) for chunk in order),
            *(Moment(chunk, Segment.BACKWARD, live[chunk]) for chunk in reversed(order)),
            *(Moment(c, Segment.UPDATE) for c in order if chunks[c].update_bytes),
        ),
    )


@st.composite
def chunk_sizes(draw: st.DrawFn, max_chunks: int = 7) -> tuple[ChunkBytes, ...]:
    """Sizes as ranks have them: masters or none, frozen or trained, whole or not, 1 to 3 ranks."""
    chunks = []
    num_ranks = draw(st.integers(1, 3))
    for _ in range(draw(st.integers(1, max_chunks))):
        slice_numel = draw(st.integers(1, 9))
        kind = draw(st.sampled_from(["masters", "masters", "plain", "whole", "frozen"]))
        is_whole = kind == "whole"
        itemsize = 2 if kind == "masters" else 4
        chunks.append(
            ChunkBytes(
                whole_bytes=0 if is_whole else num_ranks * slice_numel * itemsize,
                working_bytes=0 if is_whole else slice_numel * itemsize,
                copy_bytes=slice_numel * itemsize if is_whole else 0,
                master_bytes=slice_numel * 4 if kind == "masters" else 0,
                optimizer_bytes=slice_numel * 8 if kind != "frozen" else 0,
                gradient_bytes=slice_numel * itemsize if kind != "frozen" else 0,
            )
        )
    return tuple(chunks)


@st.composite
def training_steps(draw: st.DrawFn) -> Trace:
    """Steps of several micro-batches, with chunks used repeatedly and out of order."""
    chunks = draw(chunk_sizes())
    all_chunks = list(range(len(chunks)))
    moments: list[Moment] = []
    used: set[int] = set()
    for _ in range(draw(st.integers(1, 2))):
        forward = draw(st.permutations(all_chunks))
        again = draw(st.lists(st.sampled_from(all_chunks), max_size=4))
        for segment, uses in (
            (Segment.FORWARD, [*forward, *again]),
            (Segment.BACKWARD, [*again, *reversed(forward)]),
        ):
            live = draw(st.lists(st.integers(0, 9), min_size=len(uses), max_size=len(uses)))
            moments += [Moment(c, segment, b) for c, b in zip(uses, live, strict=True)]
            used.update(uses)
    updates = draw(st.permutations([c for c in sorted(used) if chunks[c].update_bytes]))
    moments += [Moment(chunk, Segment.UPDATE) for chunk in updates]
    return Trace(chunks=chunks, moments=tuple(moments))


@st.composite
def paces(draw: st.DrawFn, chunks: tuple[ChunkBytes, ...]) -> Pace:
    """Paces that every chunk can keep."""
    largest = max(chunk.whole_bytes for chunk in chunks)
    total = sum(chunk.whole_bytes for chunk in chunks)
    return Pace(
        gather_bytes=draw(st.integers(largest, max(largest, total))),
        prefetch_bytes=draw(st.integers(0, total)),
        depth=draw(st.integers(0, 2)),
        update_tier=draw(st.sampled_from([Tier.HOST, Tier.ACCELERATOR])),
    )
