"""The text, its split and its batches are the same everywhere and for any number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.cli.train.config import TrainConfig
from shardwise.cli.train.corpus import Corpus, load_corpus
from shardwise.cli.train.feed import Feed
from shardwise.cli.train.settings import load
from shardwise.errors import ConfigurationError
from tests.cli.text import make_text

TOKENS = torch.arange(5000) % 251


def small_corpus() -> Corpus:
    text = TOKENS.to(torch.uint8)
    return Corpus(training=text[:4500], validation=text[4500:], num_documents=1, source="numbers")


def load_text(path, *, sequence=16, limit_bytes=2**20):
    return load_corpus(path, sequence=sequence, limit_bytes=limit_bytes, validation_fraction=0.05)


def test_the_standard_library_is_found_and_read_twice_alike():
    first, second = load_text(None), load_text(None)
    assert torch.equal(first.training, second.training)
    assert torch.equal(first.validation, second.validation)
    assert first.num_documents > 10
    text = bytes(first.training.tolist())
    assert b"import " in text
    assert len(first.training) + len(first.validation) == 2**20


def test_order_does_not_depend_on_where_the_folder_lies(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name / "sub").mkdir(parents=True)
        for file in ("b.txt", "sub/a.txt", "c.txt"):
            (tmp_path / name / file).write_text(f"text of {file} " * 20, encoding="utf-8")
    here, there = (load_text(str(tmp_path / name)) for name in ("here", "there"))
    assert torch.equal(here.training, there.training)
    assert here.num_documents == 3


def test_what_is_no_text_is_left_out(tmp_path):
    make_text(tmp_path)
    (tmp_path / "picture").write_bytes(b"\x89\x00\x01" * 50)
    (tmp_path / ".hidden").write_text("hidden " * 50, encoding="utf-8")
    (tmp_path / "empty.txt").touch()
    assert load_text(str(tmp_path)).num_documents == 1


def test_training_and_validation_text_do_not_overlap(tmp_path):
    file = make_text(tmp_path)
    corpus = load_text(str(file))
    joined = torch.cat([corpus.training, corpus.validation])
    assert bytes(joined.tolist()).startswith(file.read_bytes())


def test_text_that_is_absent_empty_or_too_short_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=r"--data .* not found"):
        load_text(str(tmp_path / "absent"))
    with pytest.raises(ConfigurationError, match=r"--data .* found none"):
        load_text(str(tmp_path))
    file = make_text(tmp_path)
    with pytest.raises(ConfigurationError, match=r"--sequence expected at most \d+ bytes but got"):
        load_text(str(file), sequence=file.stat().st_size)
    with pytest.raises(ConfigurationError, match="validation part"):
        load_text(str(file), sequence=2000)


@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**40),
    step=st.integers(0, 10**6),
    ranks=st.integers(1, 5),
    micros=st.integers(1, 3),
    samples=st.integers(1, 4),
)
def test_batches_of_ranks_join_to_the_batch_of_one_process(seed, step, ranks, micros, samples):
    corpus = small_corpus()
    common = {"corpus": corpus, "seed": seed, "sequence": 8, "device": torch.device("cpu")}
    many = Feed(**common, samples=samples, accumulation=micros, world_size=ranks)
    one = Feed(**common, samples=samples * ranks, accumulation=micros, world_size=1)
    assert many.step_tokens == one.step_tokens
    for micro in range(micros):
        parts = [many.micro_batch(step=step, micro=micro, rank=rank) for rank in range(ranks)]
        whole = one.micro_batch(step=step, micro=micro, rank=0)
        assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
        assert torch.equal(torch.cat([part.targets for part in parts]), whole.targets)


def test_targets_are_the_inputs_moved_on_by_one_byte():
    batch = small_corpus().batch(seed=1, step=2, part=0, parts=1, sequence=12, samples=5)
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    assert torch.equal((batch.inputs + 1) % 251, batch.targets)


def test_steps_and_seeds_see_different_samples():
    corpus = small_corpus()
    starts = {
        tuple(
            corpus.batch(seed=s, step=k, part=0, parts=1, sequence=4, samples=8)
            .inputs[:, 0]
            .tolist()
        )
        for s in range(4)
        for k in range(4)
    }
    assert len(starts) == 16


def test_validation_samples_are_fixed_and_reach_both_ends():
    corpus = small_corpus()
    batch = corpus.validation_batch(first=0, samples=10, total=10, sequence=16)
    assert batch.inputs[0, 0] == corpus.validation[0]
    assert batch.targets[-1, -1] == corpus.validation[-1]
    beyond = corpus.validation_batch(first=8, samples=4, total=10, sequence=16)
    assert torch.equal(beyond.inputs[:2], batch.inputs[8:])
    assert torch.equal(beyond.inputs[2:], batch.inputs[9:].expand(2, -1))


def test_a_feed_follows_the_configuration():
    config = load(None, {"run.batch": 3, "run.accumulation": 2, "data.sequence": 10})
    feed = Feed.of(config, small_corpus(), world_size=4, device=torch.device("cpu"))
    assert feed.step_tokens == 3 * 2 * 10 * 4
    assert feed.seed == TrainConfig().run.seed
