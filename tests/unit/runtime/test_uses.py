"""A recorded order predicts until the first difference, and never wrongly says that it knows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardwise.residency import Segment
from shardwise.runtime.uses import UseOrder

ORDERS = st.lists(st.integers(0, 5).map(str), max_size=20)


class Item:
    """Compared by identity, as chunks are."""

    def __init__(self, name: str) -> None:
        self.name = name


ITEMS = {str(n): Item(str(n)) for n in range(6)}


def distinct(names: list[str]) -> list[Item]:
    """Drop repetitions in a row, which count once."""
    items = [ITEMS[name] for name in names]
    return [item for i, item in enumerate(items) if i == 0 or items[i - 1] is not item]


def record(order: UseOrder[Item], names: list[str], segment: Segment = Segment.FORWARD) -> None:
    order.begin(segment)
    for name in names:
        order.note(ITEMS[name])


@given(ORDERS)
def test_the_second_run_is_predicted_use_by_use(names: list[str]) -> None:
    order: UseOrder[Item] = UseOrder()
    record(order, names)
    order.begin(Segment.FORWARD)
    uses = distinct(names)
    for position, item in enumerate(uses):
        assert order.upcoming() == uses[position:]
        order.note(item)
        rest = uses[position + 1 :]
        assert order.upcoming() == rest
        for other in ITEMS.values():
            expected = rest.index(other) + 1 if other in rest else None
            assert order.next_use(other) == expected


@given(ORDERS, ORDERS)
def test_after_a_difference_nothing_is_predicted_and_the_new_order_is_kept(
    first: list[str], second: list[str]
) -> None:
    order: UseOrder[Item] = UseOrder()
    record(order, first)
    record(order, second)
    old, new = distinct(first), distinct(second)
    if old[: len(new)] != new and old:
        assert not order.is_predicting
        assert order.upcoming() == []
        assert all(order.next_use(item) is None for item in ITEMS.values())
    order.begin(Segment.FORWARD)
    assert order.upcoming() == (new or old)


@given(ORDERS, ORDERS)
def test_segments_have_orders_of_their_own(forward: list[str], backward: list[str]) -> None:
    order: UseOrder[Item] = UseOrder()
    for _ in range(2):
        record(order, forward, Segment.FORWARD)
        record(order, backward, Segment.BACKWARD)
    order.begin(Segment.FORWARD)
    assert order.upcoming() == distinct(forward)
    order.begin(Segment.BACKWARD)
    assert order.upcoming() == distinct(backward)
    order.begin(Segment.EVALUATION)
    assert order.upcoming() == []
