"""Fixed fractions are kept to within one chunk, and every choice has a residency."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import ConfigurationError
from shardwise.options import AdaptiveOffload, Budget, StaticOffload
from shardwise.residency import (
    ChunkBytes,
    Fractions,
    Limits,
    Needs,
    Pace,
    Purpose,
    Tier,
    choose_residency,
    divide,
    find_preset,
    reside,
)
from tests.unit.residency.kit import chunk_sizes

FRACTIONS = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1))


def pairs_of(chunks, residency, away: Tier):
    """(bytes, is away) of working slices and of updates, chunk by chunk."""
    working = [
        (c.working_bytes, residency.home(i, Purpose.WORKING) is away) for i, c in enumerate(chunks)
    ]
    update = [(c.update_bytes, residency.update_home(i) is away) for i, c in enumerate(chunks)]
    return working, update


@settings(deadline=None)
@given(chunks=chunk_sizes(), parameters=FRACTIONS, optimizer=FRACTIONS)
def test_fractions_hold_to_half_a_chunk_after_every_chunk(
    chunks: tuple[ChunkBytes, ...], parameters: float, optimizer: float
) -> None:
    choice = StaticOffload(parameters=parameters, optimizer=optimizer)
    rows = pairs_of(chunks, divide(chunks, choice), Tier.HOST)
    for row, fraction in zip(rows, (parameters, optimizer), strict=True):
        largest = max(size for size, _ in row)
        for stop in range(len(row) + 1):
            away = sum(size for size, is_away in row[:stop] if is_away)
            wanted = fraction * sum(size for size, _ in row[:stop])
            assert abs(away - wanted) <= largest / 2 + 1e-9


@settings(deadline=None)
@given(chunk_sizes())
def test_nothing_and_everything_are_exact(chunks: tuple[ChunkBytes, ...]) -> None:
    total = sum(c.working_bytes + c.update_bytes for c in chunks)
    stays = divide(chunks, StaticOffload())
    goes = divide(
        chunks, StaticOffload(parameters=1.0, optimizer=1.0, to="disk", disk_path="state")
    )
    assert stays.bytes_in(Tier.ACCELERATOR, chunks) == total
    gradients = sum(c.gradient_bytes for c in chunks)
    copies = sum(c.copy_bytes for c in chunks)
    assert goes.bytes_in(Tier.DISK, chunks) == total + copies - gradients
    assert goes.bytes_in(Tier.HOST, chunks) == gradients


def test_what_lies_elsewhere_is_spread_over_the_order_of_use() -> None:
    chunks = (ChunkBytes(optimizer_bytes=1),) * 9
    residency = divide(chunks, StaticOffload(optimizer=1 / 3))
    assert [residency.update_home(i) is Tier.HOST for i in range(9)] == [False, True, False] * 3


@pytest.mark.parametrize(
    ("offload", "homes"),
    [
        (None, [Tier.ACCELERATOR, Tier.ACCELERATOR]),
        (StaticOffload(optimizer=1.0), [Tier.ACCELERATOR, Tier.HOST]),
        (AdaptiveOffload(Budget(accelerator=4)), [Tier.ACCELERATOR, Tier.HOST]),
    ],
    ids=["none", "static", "adaptive"],
)
def test_every_choice_of_the_user_has_a_residency(offload, homes: list[Tier]) -> None:
    found = choose_residency(
        (ChunkBytes(working_bytes=2, master_bytes=4),),
        offload,
        limits=Limits(accelerator_bytes=4),
        needs=Needs(activation_bytes=0),
        pace=Pace(),
    )
    assert found == reside(homes[:1], homes[1:])


ON_HOST = StaticOffload(parameters=1.0, optimizer=1.0)


@pytest.mark.parametrize(
    ("name", "offload", "keep_bytes"),
    [
        ("cuda", StaticOffload(), None),
        ("cpu", ON_HOST, 0),
        ("const", ON_HOST, 512 * 2**20),
        ("auto", AdaptiveOffload(Budget(accelerator="90%")), 0),
        ("static", StaticOffload(), 0),
    ],
)
def test_the_policies_of_an_earlier_manager_have_their_names(
    name, offload, keep_bytes: int | None
) -> None:
    preset = find_preset(name, whole_bytes=1000)
    assert (preset.offload, preset.keep_bytes) == (offload, keep_bytes)


def test_fractions_of_the_static_policy_are_independent() -> None:
    fractions = Fractions(shard=0.25, parameters=0.5, optimizer=0.75)
    preset = find_preset("static", whole_bytes=1000, fractions=fractions)
    assert preset.offload == StaticOffload(parameters=0.5, optimizer=0.75)
    assert preset.keep_bytes == 750


@pytest.mark.parametrize(
    ("name", "fractions", "what"),
    [
        ("gpu", None, "policy"),
        ("cpu", Fractions(), "fractions"),
        ("static", Fractions(shard=2), "shard"),
        ("static", Fractions(optimizer=2), "optimizer"),
    ],
    ids=["unknown", "without effect", "shard", "optimizer"],
)
def test_policies_that_cannot_be_are_refused(name, fractions, what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        find_preset(name, fractions=fractions)
