"""Storage that fails on one rank: all ranks raise, nothing is left over, nothing was replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.kit.faults import FAILURES, fail, watched
from tests.kit.oracle import assert_bit_equal

if TYPE_CHECKING:
    from pathlib import Path


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return sw.shard(nn.Linear(7, 5), stage=3)


def _values(path: Path) -> dict[str, torch.Tensor]:
    model = _model(0)
    sw.load(path, model)
    with sw.full_parameters(model):
        return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.world_size(1, 2, timeout_s=60)
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failing_call_on_any_rank_leaves_all_as_it_was(failure: str, tmp_path: Path) -> None:
    sw.save(tmp_path / "a", _model(1))
    expected = _values(tmp_path / "a")
    new, rank = _model(2), dist.get_rank()
    for failing in range(dist.get_world_size()):
        number, is_over = 0, False
        while not is_over:

            def act(
                call: int, name: str, _: Any, last: int = number, failing: int = failing
            ) -> None:
                # removing what is worthless never fails a save
                is_removal = name in ("remove_file", "remove_folder", "lock")
                if rank == failing and call == last and not is_removal:
                    fail(FAILURES[failure])

            published = []

            def after(_: int, name: str, done: list[str] = published) -> None:
                if name == "exchange":
                    done.append(name)

            message = ""
            with watched(act, after=after) as counter:
                try:
                    sw.save(tmp_path / "a", new)
                except sw.CheckpointError as error:
                    message = str(error)
            outcomes: list[Any] = [None] * dist.get_world_size()
            is_refused = bool(message)
            assert "storage expected" in message or not is_refused
            dist.all_gather_object(outcomes, (is_refused, counter.num_calls, bool(published)))
            assert len({refused for refused, _, _ in outcomes}) == 1
            if is_refused and not outcomes[0][2]:
                assert_bit_equal(_values(tmp_path / "a"), expected)
            is_over = outcomes[failing][1] <= number
            number += 1
            dist.barrier()
            assert [path.name for path in tmp_path.iterdir()] == ["a"]
            sw.save(tmp_path / "a", _model(1))
        assert number > 3


@pytest.mark.world_size(2, timeout_s=30)
def test_a_place_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    if dist.get_rank() == 0:
        (tmp_path / "a").mkdir()
        (tmp_path / "a" / "thesis.tex").write_text("all of it")
        (tmp_path / "b").write_text("a file")
    dist.barrier()
    for name in ("a", "b"):
        with pytest.raises(sw.CheckpointError, match="choose another path"):
            sw.save(tmp_path / name, _model(1))
    assert (tmp_path / "a" / "thesis.tex").read_text() == "all of it"
    assert (tmp_path / "b").read_text() == "a file"
