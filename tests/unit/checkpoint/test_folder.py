"""Checkpoints in one directory: which is the newest, which are kept, and who may remove what."""

from __future__ import annotations

import errno
import importlib
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import shardwise as sw
from shardwise.checkpoint import disk, folder
from shardwise.checkpoint.folder import Writing
from shardwise.checkpoint.manifest import read_manifest

if TYPE_CHECKING:
    from pathlib import Path


def _model(value: float) -> nn.Module:
    model = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def _value_in(path: Path) -> float:
    model = _model(0.0)
    sw.load(path, model)
    return model.bias[0].item()


def _names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_the_newest_is_the_one_saved_last_whatever_its_name(tmp_path: Path) -> None:
    for name in ("step-9", "step-10", "a"):
        sw.save(tmp_path / name, _model(1.0))
        assert sw.latest(tmp_path) == tmp_path / name
    sw.save(tmp_path / "step-9", _model(2.0))
    assert sw.latest(tmp_path) == tmp_path / "step-9"


def test_a_clock_that_goes_back_changes_no_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sw.save(tmp_path / "a", _model(1.0))
    with monkeypatch.context() as patch:
        patch.setattr(folder.time, "time_ns", lambda: 7)
        sw.save(tmp_path / "b", _model(1.0))
    assert sw.latest(tmp_path) == tmp_path / "b"
    saved_ns = [read_manifest(tmp_path / name).saved_ns for name in ("a", "b")]
    assert saved_ns == sorted(saved_ns)


def test_there_is_none_in_a_directory_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "log.txt").touch()
    assert sw.latest(tmp_path) is None
    assert sw.latest(tmp_path / "missing") is None


def test_the_newest_are_kept_and_other_things_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    for number in range(5):
        sw.save(tmp_path / f"step-{number}", _model(number), keep_last=2)
    assert _names(tmp_path) == ["notes", "step-3", "step-4"]


def test_damaged_checkpoints_are_not_counted_as_kept(tmp_path: Path) -> None:
    for name in ("a", "b"):
        sw.save(tmp_path / name, _model(1.0))
    (tmp_path / "b" / "__0_0.distcp").unlink()
    sw.save(tmp_path / "c", _model(1.0), keep_last=2)
    assert _names(tmp_path) == ["a", "b", "c"]


@pytest.mark.parametrize("keep_last", [0, -1, True, 1.5])
def test_a_number_that_keeps_none_is_refused(keep_last: object, tmp_path: Path) -> None:
    with pytest.raises(sw.CheckpointError, match="keep_last"):
        sw.save(tmp_path / "a", _model(1.0), keep_last=keep_last)  # type: ignore
    assert _names(tmp_path) == []


def test_two_jobs_that_save_to_one_place_do_not_mix(tmp_path: Path) -> None:
    """The second begins and ends while the first one writes; then the first one ends."""
    first = Writing(tmp_path / "a")
    (first.draft.folder / "mine").touch()
    sw.save(tmp_path / "a", _model(2.0))
    assert _value_in(tmp_path / "a") == 2.0
    assert (first.draft.folder / "mine").exists()
    first.publish()
    first.close()
    assert _names(tmp_path / "a") == ["mine"]
    assert _names(tmp_path) == ["a"]


def test_what_a_dead_writer_left_is_removed_by_the_next(tmp_path: Path) -> None:
    token = "0123456789abcdef"
    for kind in ("partial", "trash"):
        (tmp_path / f".a.{token}.{kind}").mkdir()
        (tmp_path / f".a.{token}.{kind}" / "data").touch()
    (tmp_path / f".a.{token}.lock").touch()
    (tmp_path / ".other").touch()
    sw.save(tmp_path / "b", _model(1.0))
    assert _names(tmp_path) == [".other", "b"]


def test_without_locks_checkpoints_work_and_leftovers_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host may be writing them."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(disk.fcntl, "flock", refuse)
    left = tmp_path / ".a.0123456789abcdef.partial"
    left.mkdir()
    left.with_suffix(".lock").touch()
    sw.save(tmp_path / "a", _model(1.0))
    assert _value_in(tmp_path / "a") == 1.0
    assert _names(tmp_path) == [left.with_suffix(".lock").name, left.name, "a"]


def test_a_checkpoint_between_two_renames_is_found_and_gets_its_name_back(tmp_path: Path) -> None:
    sw.save(tmp_path / "a", _model(1.0))
    old = tmp_path / ".a.0123456789abcdef.old"
    (tmp_path / "a").rename(old)
    assert sw.latest(tmp_path) == old
    assert _value_in(old) == 1.0
    sw.save(tmp_path / "b", _model(2.0))
    assert _value_in(tmp_path / "a") == 1.0


def test_an_earlier_checkpoint_is_replaced_whole(tmp_path: Path) -> None:
    sw.save(tmp_path / "a", _model(1.0), extra={"old": 1})
    sw.save(tmp_path / "a", _model(2.0), extra={"new": 2})
    assert sw.load(tmp_path / "a", _model(0.0)) == {"new": 2}
    assert _value_in(tmp_path / "a") == 2.0


def test_a_relative_path_and_missing_parents_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sw.save("deep/er/a", _model(1.0))
    assert _value_in(tmp_path / "deep" / "er" / "a") == 1.0


def test_saving_to_a_link_replaces_the_link_and_leaves_nothing(tmp_path: Path) -> None:
    sw.save(tmp_path / "a", _model(1.0))
    (tmp_path / "b").symlink_to(tmp_path / "a")
    assert _value_in(tmp_path / "b") == 1.0
    sw.save(tmp_path / "b", _model(2.0))
    assert (_value_in(tmp_path / "a"), _value_in(tmp_path / "b")) == (1.0, 2.0)
    assert _names(tmp_path) == ["a", "b"]


def test_a_checkpoint_keeps_its_name_where_the_new_one_cannot_take_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system that cannot exchange folders, between the two renames."""
    sw.save(tmp_path / "a", _model(1.0))
    rename = disk.rename

    def fail(source: Path, target: Path) -> None:
        if source.suffix == ".partial":
            raise OSError(errno.EIO, "device")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(disk, "exchange", lambda *_: False)
        patch.setattr(disk, "rename", fail)
        with pytest.raises(sw.CheckpointError, match="device"):
            sw.save(tmp_path / "a", _model(2.0))
    assert _value_in(tmp_path / "a") == 1.0
    assert _names(tmp_path) == ["a"]


@pytest.mark.parametrize("moment", ["verified", "read"])
def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_noticed(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sw.save(tmp_path / "a", _model(1.0))
    model = _model(0.0)
    name = {"verified": "Source", "read": "_parts_of"}[moment]
    module = importlib.import_module("shardwise.checkpoint.load")
    original, is_replaced = getattr(module, name), []

    def replacing(*arguments: object, **options: object) -> object:
        if not is_replaced:
            is_replaced.append(True)
            sw.save(tmp_path / "a", _model(2.0))
        return original(*arguments, **options)

    monkeypatch.setattr(module, name, replacing)
    with pytest.raises(sw.CheckpointError, match="another that a job has saved in its place"):
        sw.load(tmp_path / "a", model)
    if moment == "verified":
        assert model.bias[0].item() == 0.0


def test_modules_may_be_called_as_parts_of_a_checkpoint_are(tmp_path: Path) -> None:
    model = nn.ModuleDict({"optimizer": nn.Linear(2, 1), "optim": nn.Linear(2, 1)})
    sw.save(tmp_path / "a", model)
    other = nn.ModuleDict({"optimizer": nn.Linear(2, 1), "optim": nn.Linear(2, 1)})
    sw.load(tmp_path / "a", other)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value)
    (file,) = sw.export(tmp_path / "a", tmp_path / "out")
    assert load_file(file).keys() == model.state_dict().keys()
    with pytest.raises(sw.CheckpointError, match="missing 'the optimizer'"):
        sw.load(tmp_path / "a", other, torch.optim.SGD(other.parameters()))


@pytest.mark.parametrize("name", ["shardwise", "optimizer.state"])
def test_names_that_mean_something_else_are_refused(name: str, tmp_path: Path) -> None:
    model: nn.Module = nn.Linear(2, 1)
    for part in reversed(name.split(".")):
        model = nn.ModuleDict({part: model})
    with pytest.raises(sw.CheckpointError, match="rename the module"):
        sw.save(tmp_path / "a", model)
    assert _names(tmp_path) == []
