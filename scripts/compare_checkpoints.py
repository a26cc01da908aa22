"""Say whether the newest checkpoints of two folders hold the same bits; exit code 1 if not."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

import shardwise as sw


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a folder's newest checkpoint, by name."""
    path = sw.latest(folder)
    if path is None:
        sys.exit(f"{folder} has no checkpoint")
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():  # of a single process, which this is
        warnings.simplefilter("ignore", UserWarning)
        dcp.load(tensors, checkpoint_id=path, no_dist=True)
    return tensors


def main(one: Path, other: Path) -> int:
    """Compare, print what was found, and return the exit code."""
    first, second = tensors_of(one), tensors_of(other)
    differing = sorted(first.keys() ^ second.keys())
    differing += [n for n in first.keys() & second.keys() if not torch.equal(first[n], second[n])]
    if differing:
        print(f"{len(differing)} tensors differ, among them {differing[0]}")
        return 1
    num_bytes = sum(tensor.nbytes for tensor in first.values())
    print(f"equal bits: {len(first)} tensors, masters and state included, {num_bytes:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
