"""The parity check passes where training is right, and fails where it is not."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest
import torch

from shardwise.cli.train import parity
from shardwise.cli.train.corpus import load_corpus
from shardwise.cli.train.feed import Feed
from shardwise.cli.train.interrupt import StopRequest
from shardwise.cli.train.ranks import Ranks
from shardwise.cli.train.settings import load
from tests.cli.text import make_text

CPU = torch.device("cpu")


def set_up(folder, world_size, **options):
    file = make_text(folder)
    config = load(
        None,
        {
            "model": "tiny",
            "data.path": str(file),
            "data.sequence": 32,
            "run.batch": 2,
            "run.steps": 8,
            "run.check_parity": 4,
            "shard.precision": "fp32",
            **options,
        },
    )
    corpus = load_corpus(str(file), sequence=32, limit_bytes=2**20, validation_fraction=0.05)
    return config, Feed.of(config, corpus, world_size=world_size, device=CPU)


def results(config, feed):
    ranks = Ranks.from_environment()
    found = [
        parity.compare(comparison, feed, ranks=ranks, stop=StopRequest())
        for comparison in parity.comparisons(config, CPU)
    ]
    assert None not in found
    return found


@pytest.mark.world_size(1, 2, 3, timeout_s=60)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_is_bit_equal_and_clipping_within_tolerance(tmp_path, world_size, stage):
    config, feed = set_up(tmp_path, world_size, **{"shard.stage": stage, "run.accumulation": 2})
    exact, clipped = results(config, feed)
    assert exact.is_bit_equal
    assert exact.max_loss_difference == 0.0
    assert exact.has_passed
    assert clipped.has_passed


@pytest.mark.world_size(2, timeout_s=60)
def test_state_on_disk_is_bit_equal_too(tmp_path, world_size):
    options = {
        "shard.stage": 3,
        "shard.offload_optimizer": 1.0,
        "shard.offload_parameters": 1.0,
        "shard.offload_path": str(tmp_path),
    }
    config, feed = set_up(tmp_path, world_size, **options)
    exact, clipped = results(config, feed)
    assert exact.is_bit_equal
    assert clipped.has_passed


@pytest.mark.world_size(4, timeout_s=60)
def test_hybrid_sharding_is_bit_equal(tmp_path, world_size):
    config, feed = set_up(tmp_path, world_size, **{"shard.shard_size": 2})
    assert results(config, feed)[0].is_bit_equal


@pytest.mark.world_size(2, timeout_s=60)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bits_pass_within_tolerance(tmp_path, world_size, precision):
    config, feed = set_up(tmp_path, world_size, **{"shard.precision": precision})
    exact, own = results(config, feed)
    assert exact.is_bit_equal
    assert own.has_passed
    assert own.name.startswith(precision)


@pytest.mark.world_size(2, timeout_s=60)
def test_a_difference_is_found_on_all_ranks(tmp_path, world_size):
    config, feed = set_up(tmp_path, world_size, **{"optimizer.clip_grad_norm": 0.0})
    (comparison,) = parity.comparisons(config, CPU)
    shifted = replace(feed, seed=feed.seed + Ranks.from_environment().rank)
    found = parity.compare(comparison, shifted, ranks=Ranks.from_environment(), stop=StopRequest())
    assert found is not None
    assert not found.has_passed


@pytest.mark.world_size(2, timeout_s=60)
def test_one_rank_asked_to_stop_stops_all(tmp_path, world_size):
    config, feed = set_up(tmp_path, world_size)
    ranks, stop = Ranks.from_environment(), StopRequest()
    stop.signal = signal.SIGTERM if ranks.rank == 1 else 0
    comparison = parity.comparisons(config, CPU)[0]
    assert parity.compare(comparison, feed, ranks=ranks, stop=stop) is None


def test_settings_that_are_exact_already_are_compared_once(tmp_path):
    config, _ = set_up(tmp_path, 1, **{"optimizer.clip_grad_norm": 0.0})
    assert [c.loss_tolerance for c in parity.comparisons(config, CPU)] == [0.0]
