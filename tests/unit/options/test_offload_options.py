"""Sizes are read exactly, and choices that cannot work or have no effect are refused when made."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import ConfigurationError
from shardwise.options import AdaptiveOffload, Budget, StaticOffload, resolve_bytes


@pytest.mark.parametrize(
    ("size", "expected_bytes"),
    [
        (0, 0),
        (7, 7),
        ("60GiB", 60 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("1.1KB", 1100),
        ("3 tib", 3 * 2**40),
        (" 12B ", 12),
        ("80%", 800),
        ("33.3%", 333),
        ("100%", 1000),
        (None, None),
    ],
)
def test_sizes_are_exact(size, expected_bytes: int | None) -> None:
    assert resolve_bytes(size, capacity_bytes=1000, what="size") == expected_bytes


@given(st.integers(0, 2**60))
def test_bytes_survive_every_way_of_writing_them(size_bytes: int) -> None:
    for size in (size_bytes, f"{size_bytes}B"):
        assert resolve_bytes(size, capacity_bytes=None, what="size") == size_bytes


@pytest.mark.parametrize(
    "size",
    [
        "",
        "60",
        "GiB",
        "-1GiB",
        "1e3MiB",
        "60GiBs",
        "1.GB",
        "3iB",
        "0%",
        "101%",
        -1,
        1.5,
        True,
        "1 000B",
    ],
    ids=ascii,
)
def test_sizes_that_cannot_be_read_are_refused_by_name(size) -> None:
    with pytest.raises(ConfigurationError, match=r"Budget\.host expected .*60GiB"):
        Budget(host=size)


def test_a_share_of_an_unknown_capacity_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"Budget\.disk .*capacity .* not known"):
        resolve_bytes("80%", capacity_bytes=None, what="Budget.disk")


def test_a_disk_needs_a_folder() -> None:
    with pytest.raises(ConfigurationError, match="disk_path"):
        Budget(disk="1TB")
    assert Budget(disk="1TB", disk_path="state").disk == "1TB"
    assert Budget(disk_path=Path("state")).disk is None


@pytest.mark.parametrize("path", ["", 3, b"state"], ids=repr)
def test_a_folder_is_a_path(path) -> None:
    with pytest.raises(ConfigurationError, match="disk_path"):
        Budget(disk_path=path)


@pytest.mark.parametrize("name", ["parameters", "optimizer"])
@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), "1", None, True], ids=repr)
def test_fractions_lie_between_zero_and_one(name: str, fraction) -> None:
    with pytest.raises(ConfigurationError, match=name):
        StaticOffload(**{name: fraction})


@pytest.mark.parametrize(
    "options",
    [{"to": "disk"}, {"to": "host", "disk_path": "state"}, {"to": "accelerator"}],
    ids=["disk without a folder", "a folder without a disk", "no other tier"],
)
def test_a_folder_comes_with_the_disk_and_only_then(options: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match="StaticOffload"):
        StaticOffload(optimizer=1.0, **options)


def test_an_adaptive_offload_takes_a_budget() -> None:
    assert AdaptiveOffload(Budget(accelerator=5)).budget.accelerator == 5
    with pytest.raises(ConfigurationError, match="Budget"):
        AdaptiveOffload("60GiB")


@pytest.mark.parametrize(
    "choice", [Budget(), StaticOffload(), AdaptiveOffload(Budget())], ids=lambda c: type(c).__name__
)
def test_choices_are_values(choice) -> None:
    name = fields(choice)[0].name
    with pytest.raises(FrozenInstanceError):
        setattr(choice, name, getattr(choice, name))
    assert len({choice, replace(choice)}) == 1
