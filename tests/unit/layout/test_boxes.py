"""Boxes cover a run of a tensor's memory exactly, and there are few of them."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwise.layout import cover


@st.composite
def _runs(draw):
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, order, start, draw(st.integers(start, numel))


@given(_runs())
def test_boxes_hold_the_elements_of_the_run_in_memory_order(run):
    shape, order, start, stop = run
    memory = torch.arange(math.prod(shape))
    outer_first = memory.view([shape[dim] for dim in order])
    tensor = outer_first.permute([order.index(dim) for dim in range(len(shape))])
    found = []
    for box in cover(start, stop, tensor.shape, tensor.stride()):
        view = tensor
        for dim, (offset, size) in enumerate(zip(box.offset, box.size, strict=True)):
            view = view.narrow(dim, offset, size)
        flat = view.permute(box.order).reshape(-1)
        assert box.start == len(found)
        assert box.numel == len(flat)
        found += flat.tolist()
    assert found == list(range(start, stop))


@given(_runs())
def test_a_run_needs_few_boxes(run):
    shape, _, start, stop = run
    stride = torch.empty(shape, device="meta").stride()
    num_boxes = len(cover(start, stop, shape, stride))
    assert num_boxes <= max(1, 2 * (len(shape) - 1) + 1)
    assert (num_boxes == 0) == (start == stop)
