"""Values whose every bit counts."""

from __future__ import annotations

import torch


def random_values(numel: int, dtype: torch.dtype, *, seed: int = 0) -> torch.Tensor:
    """Return elements of random bits, NaN and infinity among them; a bool has only one bit."""
    generator = torch.Generator().manual_seed(seed)
    end = 2 if dtype == torch.bool else 256
    bits = torch.randint(0, end, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype)


def have_equal_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are equal to the bit, NaN included."""
    return left.dtype == right.dtype and torch.equal(
        left.view(torch.uint8), right.view(torch.uint8)
    )
