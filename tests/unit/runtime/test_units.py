"""Which modules are units, and which parameters are packed together."""

from __future__ import annotations

import pytest
from torch import nn

import shardwise as sw
from shardwise.runtime.units import NEIGHBOUR_BYTES, bundle, find_units
from tests.kit.models import TinyGPT, TinyGPTConfig


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        self.norm = nn.LayerNorm(2)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.Sequential(Block(), Block())
        self.mixed = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 2))
        self.head = nn.Linear(2, 3)


def names(module: nn.Module, kinds=None) -> list[str]:
    return [unit.name for unit in find_units(module, kinds)]


def test_blocks_of_repeated_containers_are_units_as_a_whole() -> None:
    """Experts inside a block are not: which of them run depends on data."""
    assert names(Stack()) == [
        "embedding",
        "encoder.0",
        "encoder.1",
        "decoder.0",
        "decoder.1",
        "mixed.0",
        "mixed.2",
        "head",
    ]
    whole = [unit.name for unit in find_units(Stack(), None) if unit.is_whole]
    assert whole == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]


def test_classes_may_be_named_instead() -> None:
    assert [u.name for u in find_units(Stack(), [nn.Sequential]) if u.is_whole] == [
        "decoder",
        "mixed",
    ]
    with pytest.raises(sw.ConfigurationError, match=r"units.*LSTM"):
        find_units(Stack(), [Block, nn.LSTM])


def test_every_parameter_has_one_bundle_and_blocks_have_their_own() -> None:
    model = TinyGPT(TinyGPTConfig(num_blocks=3))
    bundles = bundle(find_units(model, None))
    assert set(bundles) == set(model.parameters())
    for block in model.blocks:
        [number] = {bundles[p] for p in block.parameters()}
        outside = {bundles[p] for p in model.parameters()} - {number}
        assert all(bundles[p] in outside for p in model.norm.parameters())
    # what lies before the blocks is not packed with what lies after them
    assert bundles[model.embedding.weight] == bundles[model.position]
    assert bundles[model.norm.weight] != bundles[model.embedding.weight]


def test_neighbours_share_a_bundle_up_to_a_size() -> None:
    width = int((NEIGHBOUR_BYTES / 4 / 3) ** 0.5)
    model = nn.ModuleDict({str(n): nn.ModuleDict({"x": nn.Linear(width, width)}) for n in range(7)})
    bundles = bundle(find_units(model, None))
    assert len(set(bundles.values())) == 7  # a repeated container: each is a block
    layers = nn.Module()
    for n in range(7):
        layers.add_module(f"layer{n}", nn.Linear(width, width))
    bundles = bundle(find_units(layers, None))
    sizes: dict[int, int] = {}
    for parameter, number in bundles.items():
        sizes[number] = sizes.get(number, 0) + 4 * parameter.numel()
    assert 3 <= len(sizes) <= 4
    assert max(sizes.values()) <= NEIGHBOUR_BYTES


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"units": [3]}, "module classes"),
        ({"reshard_after_forward": -1}, "reshard_after_forward"),
        ({"reshard_after_forward": "no"}, "reshard_after_forward"),
        ({"stage": 2, "reshard_after_forward": False}, "stage 3"),
        ({"stage": 1, "units": [nn.Linear]}, "stage 3"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message) -> None:
    with pytest.raises(sw.ConfigurationError, match=message):
        sw.shard(nn.Linear(2, 2), **options)
