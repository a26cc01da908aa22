"""Held bytes are what storages say, and equal the closed form where there is no padding."""

from __future__ import annotations

import pytest
import torch

import shardwise as sw
from shardwise.cli.train.table import cells, memory_rows
from shardwise.report import HeldBytes, closed_form, held_bytes

PSI = 1_000
BF16 = sw.MixedPrecision(param_dtype=torch.bfloat16)
BF16_FP32_REDUCE = sw.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_NO_MASTERS = sw.MixedPrecision(param_dtype=torch.bfloat16, master_weights=False)


@pytest.mark.parametrize(
    ("stage", "ranks", "precision", "bytes_per_parameter"),
    [
        (0, 4, None, (4, 4, 8)),
        (1, 4, None, (4, 4, 2)),
        (2, 4, None, (4, 1, 2)),
        (0, 2, BF16, (2, 2, 12)),
        (1, 2, BF16, (2, 2, 6)),
        (2, 2, BF16, (2, 1, 6)),
        (2, 2, BF16_FP32_REDUCE, (2, 2, 6)),
        (2, 2, BF16_NO_MASTERS, (2, 1, 2)),
    ],
)
def test_closed_forms_of_adam(stage, ranks, precision, bytes_per_parameter):
    held = closed_form(PSI, stage=stage, shard_size=ranks, mixed_precision=precision)
    found = (held.parameters / PSI, held.gradients / PSI, held.optimizer_state / PSI)
    assert found == bytes_per_parameter
    assert held.total == sum(bytes_per_parameter) * PSI


def test_closed_form_rounds_up_and_counts_momentum_and_buffers():
    held = closed_form(10, stage=2, shard_size=3, num_moments=1, buffer_bytes=7)
    assert held == HeldBytes(parameters=47, gradients=14, optimizer_state=14)


@pytest.mark.parametrize(
    ("stage", "precision", "choice", "on_accelerator", "host"),
    [
        (2, None, {"optimizer": 1.0}, (4, 0, 0), 2 + 4 + 2),
        (2, BF16, {"optimizer": 1.0}, (2, 0, 0), 6 + 1),
        (2, BF16, {"optimizer": 0.5}, (2, 0.5, 3), 3 + 0.5),
        (3, None, {"optimizer": 1.0, "parameters": 1.0}, (0, 0, 0), 2 + 2 + 4),
        (3, BF16, {"optimizer": 1.0, "parameters": 1.0}, (0, 0, 0), 1 + 1 + 6),
        (3, BF16, {"parameters": 1.0}, (0, 1, 6), 1),
    ],
)
def test_closed_forms_of_what_rests_on_host(stage, precision, choice, on_accelerator, host):
    """Two ranks; bytes per parameter. Without masters an update elsewhere needs a copy."""
    held = closed_form(
        PSI,
        stage=stage,
        shard_size=2,
        mixed_precision=precision,
        offload=sw.StaticOffload(**choice),
    )
    found = (held.parameters / PSI, held.gradients / PSI, held.optimizer_state / PSI)
    assert found == on_accelerator
    assert held.host == host * PSI
    assert held.disk == 0


def test_a_storage_is_counted_once_and_whole():
    flat = torch.zeros(64)
    model = torch.nn.Module()
    model.one = torch.nn.Parameter(flat[:16])
    model.two = torch.nn.Parameter(flat[16:20])
    model.tied = model.one
    optimizer = torch.optim.Adam(model.parameters())
    assert held_bytes(model, optimizer).parameters == 64 * 4


def test_plain_training_holds_sixteen_bytes_per_parameter():
    model = torch.nn.Linear(32, 32, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    model(torch.ones(1, 32)).sum().backward()
    optimizer.step()
    held = held_bytes(model, optimizer)
    scalars_bytes = 2 * 4  # the step count, and the learning rate
    assert held == HeldBytes(
        parameters=4096, gradients=4096, optimizer_state=2 * 4096 + scalars_bytes
    )
    optimizer.zero_grad()
    assert held_bytes(model, optimizer).gradients == 0


@pytest.mark.world_size(1, 2, 4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [None, BF16], ids=["fp32", "bf16"])
def test_sharded_training_holds_the_closed_form(world_size, stage, precision):
    model = torch.nn.Linear(64, 64, bias=False)
    sw.shard(model, stage=stage, mixed_precision=precision)
    optimizer = sw.ShardedOptimizer(torch.optim.AdamW(model.parameters(), fused=True))
    for _ in range(2):
        optimizer.backward(model(torch.ones(2, 64)).float().square().mean())
        gradients = held_bytes(model, optimizer).gradients
        optimizer.step()
        held = held_bytes(model, optimizer)
        optimizer.zero_grad()
    expected = closed_form(64 * 64, stage=stage, shard_size=world_size, mixed_precision=precision)
    assert held.parameters == expected.parameters
    assert gradients == expected.gradients
    assert 0 <= held.optimizer_state - expected.optimizer_state <= 64  # the step count
    assert held_bytes(model, optimizer).gradients == 0


def test_the_table_takes_the_largest_rank_and_sums_by_rank():
    expected = closed_form(PSI, stage=2, shard_size=2)
    plain = closed_form(PSI, stage=0, shard_size=2)
    everyone = [[4000.0, 2000.0, 4000.0], [4000.0, 2100.0, 3900.0]]
    rows = memory_rows(everyone, expected=expected, plain=plain)
    assert [row.measured_bytes for row in rows] == [4000, 2100, 4000, 10_000]
    assert [row.plain_bytes for row in rows] == [4000, 4000, 8000, 16_000]
    assert cells(rows[-1])[3:] == ["1.000", "0.02 MiB", "38%"]
