"""The loss scale follows its published trace."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise import ConfigurationError, LossScale
from shardwise.runtime.loss_scaling import LossScaler

OPTIONS = LossScale(
    initial_scale=16.0, growth_interval=3, hysteresis=2, min_scale=1.0, max_scale=64.0
)


def trace(options: LossScale, steps: str) -> list[float]:
    scaler = LossScaler(options)
    scales = []
    for step in steps:
        scaler.update(overflowed=step == "x")
        scales.append(scaler.scale)
    return scales


def test_the_trace_with_hysteresis_two() -> None:
    expected = [16, 8, 8, 4, 4, 4, 8, 8, 8, 4, 2, 2, 2, 4, 4]
    assert trace(OPTIONS, "xx.x...x.xx....") == expected


@given(st.text(alphabet="x.", max_size=40))
def test_hysteresis_zero_acts_as_one(steps: str) -> None:
    zero, one = (
        LossScale(initial_scale=16.0, growth_interval=3, hysteresis=h, max_scale=64.0)
        for h in (0, 1)
    )
    assert trace(zero, steps) == trace(one, steps)


@given(st.text(alphabet="x.", max_size=80))
def test_the_scale_stays_in_its_range(steps: str) -> None:
    assert all(1.0 <= scale <= 64.0 for scale in trace(OPTIONS, steps))


@given(st.text(alphabet="x.", max_size=30), st.text(alphabet="x.", max_size=30))
def test_a_restored_scaler_continues_the_same_trace(before: str, after: str) -> None:
    whole = trace(OPTIONS, before + after)
    first = LossScaler(OPTIONS)
    for step in before:
        first.update(overflowed=step == "x")
    second = LossScaler(OPTIONS)
    second.load_state_dict(first.state_dict())
    scales = []
    for step in after:
        second.update(overflowed=step == "x")
        scales.append(second.scale)
    assert scales == whole[len(before) :]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("initial_scale", 0.5),
        ("initial_scale", 2.0**30),
        ("min_scale", 0.0),
        ("max_scale", float("inf")),
        ("growth_factor", 1.0),
        ("backoff_factor", 1.0),
        ("backoff_factor", 0.0),
        ("growth_interval", 0),
        ("hysteresis", -1),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigurationError, match=field.split("_")[0]):
        LossScale(**{field: value})
