"""The model is causal, ties its embedding, and is the same for the same seed."""

from __future__ import annotations

import math

import pytest
import torch

from shardwise.cli.train.model import SIZES, VOCABULARY, build_model, next_byte_loss


@pytest.mark.parametrize("size", ["tiny", "small", "medium"])
def test_sizes_have_the_parameters_that_width_and_depth_give(size):
    width, depth = SIZES[size].width, SIZES[size].depth
    model = build_model(size, sequence=8, seed=0)
    numel = sum(parameter.numel() for parameter in model.parameters())
    assert numel == VOCABULARY * width + depth * (12 * width**2 + 2 * width) + width


def test_a_byte_is_predicted_from_earlier_ones_only():
    model = build_model("tiny", sequence=16, seed=0)
    tokens = torch.randint(0, 256, (1, 16))
    changed = tokens.clone()
    changed[0, 9:] = (changed[0, 9:] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :9], after[:, :9], rtol=0, atol=1e-6)
    assert not torch.allclose(before[:, 9:], after[:, 9:])


def test_rotary_positions_tell_orders_apart():
    model = build_model("tiny", sequence=8, seed=0)
    one, other = model(torch.tensor([[1, 2, 3]])), model(torch.tensor([[2, 1, 3]]))
    assert not torch.allclose(one[:, -1], other[:, -1])


def test_an_untrained_model_is_near_a_uniform_guess():
    model = build_model("small", sequence=32, seed=0)
    tokens = torch.randint(0, 256, (4, 33))
    loss = next_byte_loss(model(tokens[:, :-1]), tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(256), abs=0.2)


def test_weights_are_a_function_of_the_seed_and_leave_the_random_state_alone():
    state = torch.random.get_rng_state()
    one, same, other = (build_model("tiny", sequence=8, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(state, torch.random.get_rng_state())
    pairs = list(zip(one.parameters(), same.parameters(), other.parameters(), strict=True))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert any(not torch.equal(a, c) for a, _, c in pairs)


def test_generation_is_repeatable_and_goes_beyond_the_context():
    model = build_model("tiny", sequence=8, seed=0)
    text = model.generate(b"abc", length=20, seed=1)
    assert len(text) == 20
    assert text == model.generate(b"abc", length=20, seed=1)
