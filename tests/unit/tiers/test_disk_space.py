"""The file of a disk tier: as long as the budget allows, and gone whatever happens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shardwise.tiers import DiskOptions, DiskTier
from shardwise.tiers.file_calls import SystemFileCalls

DESCRIPTORS = Path("/proc/self/fd")

CHILD = """
import sys, torch
from shardwise.tiers import DiskOptions, open_tiers
tiers = open_tiers(torch.device("cpu"), disk=DiskOptions(folder=sys.argv[1]))
source = tiers.host.allocate(2**18, torch.float32)
block = tiers.disk.allocate(2**18, torch.float32)
tiers.copy(source, block).wait()
print(tiers.disk.file_bytes, flush=True)
sys.stdin.read()
"""


def test_a_killed_process_leaves_no_file_behind(tmp_path):
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert int(child.stdout.readline()) >= 2**20
        child.kill()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("has_tmpfile", [True, False])
def test_the_file_has_no_name_from_the_start(tmp_path, monkeypatch, has_tmpfile):
    if not has_tmpfile:
        monkeypatch.delattr(os, "O_TMPFILE")
    calls = SystemFileCalls()
    descriptor = calls.open_unnamed(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert calls.write(descriptor, memoryview(b"abc"), 0) == 3
    assert os.fstat(descriptor).st_nlink == 0
    calls.close(descriptor)


@pytest.mark.skipif(not DESCRIPTORS.is_dir(), reason="needs /proc")
def test_room_is_taken_on_the_device_when_a_block_is_allocated(tmp_path):
    tier = DiskTier(DiskOptions(folder=tmp_path, extent_bytes=2**20))
    [descriptor] = descriptors_in(tmp_path)
    assert os.fstat(descriptor).st_blocks == 0
    tier.allocate(1, torch.float32)
    assert os.fstat(descriptor).st_blocks * 512 >= 2**20
    tier.close()
    assert not descriptors_in(tmp_path)


def descriptors_in(folder: Path) -> list[int]:
    """Return this process' descriptors of files in a folder, also of files without a name."""
    found = []
    for link in DESCRIPTORS.iterdir():
        try:
            if folder in link.readlink().parents:
                found.append(int(link.name))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return found


def test_the_file_grows_in_extents_but_never_over_the_budget(tmp_path):
    options = DiskOptions(folder=tmp_path, extent_bytes=16384)
    with_budget = DiskTier(options, budget_bytes=5 * 4096 + 100)
    lengths = []
    for _ in range(5):
        with_budget.allocate(1024, torch.float32)
        lengths.append(with_budget.file_bytes)
    assert lengths == [16384] * 4 + [5 * 4096]
    with_budget.close()


def test_a_block_above_an_extent_gets_one_run(tmp_path):
    tier = DiskTier(DiskOptions(folder=tmp_path, extent_bytes=4096))
    tier.allocate(10 * 1024, torch.float32)
    assert tier.file_bytes == 10 * 4096
    tier.close()


def test_freed_space_is_used_before_the_file_grows(tmp_path):
    tier = DiskTier(DiskOptions(folder=tmp_path, extent_bytes=4096))
    blocks = [tier.allocate(1024, torch.float32) for _ in range(4)]
    for block in blocks[1:3]:
        tier.free(block)
    tier.allocate(2048, torch.float32)
    assert tier.file_bytes == 4 * 4096
    tier.close()
