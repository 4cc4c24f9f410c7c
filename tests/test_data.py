"""Packing, resuming and mixing of training data."""

import numpy as np
import pytest

from swa_jax.config import ConfigError
from swa_jax.data import PackedText, SourceConfig, make_batches, read_documents, text_files


class Bytes:
    """A byte tokenizer: small, and its ids can be read by eye."""

    vocab_size, eos_id, start_ids = 257, 256, []

    def encode(self, text):
        return list(text.encode())

    def decode(self, ids):
        return bytes(i for i in ids if i < 256).decode()


def documents():
    return [np.full(n, n, np.int32) for n in (5, 9, 3, 20, 7)]


def test_an_epoch_holds_every_token_once():
    packed = PackedText(documents(), 11, seed=0)
    assert packed.rows == 4
    for epoch in range(3):
        rows = [packed[epoch * packed.rows + i]["tokens"] for i in range(packed.rows)]
        assert np.array_equal(np.sort(np.concatenate(rows)), np.sort(np.concatenate(documents())))
    assert not np.array_equal(packed[0]["tokens"], packed[packed.rows]["tokens"])  # shuffled anew


def test_segments_follow_the_documents():
    packed = PackedText(documents(), 11, seed=0)
    for i in range(packed.rows):
        row = packed[i]
        borders = np.flatnonzero(np.diff(row["tokens"])) + 1  # documents are constant and all different
        assert np.array_equal(np.flatnonzero(np.diff(row["segment_ids"])) + 1, borders)
        assert row["segment_ids"][0] == 1
        assert row["tokens"].dtype == row["segment_ids"].dtype == np.int32


def test_rows_do_not_depend_on_the_order_they_are_read_in():
    one, other = PackedText(documents(), 11, seed=0), PackedText(documents(), 11, seed=0)
    forwards = [one[i]["tokens"] for i in range(12)]
    backwards = [other[i]["tokens"] for i in reversed(range(12))][::-1]
    assert np.array_equal(forwards, backwards)


def test_too_little_text_is_refused():
    with pytest.raises(ConfigError, match="44 tokens, less than one row of sequence_length = 64"):
        PackedText(documents(), 64, seed=0)


@pytest.fixture
def folder(tmp_path):
    for name, letter in (("a.txt", "a"), ("b.md", "b"), ("c.txt", "c"), ("empty.txt", ""), ("d.bin", "d")):
        (tmp_path / name).write_text(letter * 50)
    return tmp_path


def test_files_folders_and_globs(folder):
    assert [f.name for f in text_files([str(folder)])] == ["a.txt", "b.md", "c.txt", "empty.txt"]
    assert [f.name for f in text_files([f"{folder}/*.txt"])] == ["a.txt", "c.txt", "empty.txt"]
    assert [f.name for f in text_files([f"{folder}/d.bin"])] == ["d.bin"]
    assert len(text_files(["stdlib"])) > 50
    with pytest.raises(ConfigError, match=r"'nowhere\.txt': no such file"):
        text_files(["nowhere.txt"])


def test_documents_end_with_the_end_of_text_token(folder):
    read = read_documents(text_files([str(folder)]), Bytes())
    assert [len(d) for d in read] == [51, 51, 51]  # the empty file is left out
    assert all(d[-1] == 256 for d in read)


def sources(folder):
    return [SourceConfig(files=(f"{folder}/a.txt",), weight=3.0), SourceConfig(files=(f"{folder}/b.md",))]


def test_resuming_reads_exactly_the_batches_that_follow(folder):
    def batches():
        return make_batches(sources(folder), Bytes(), length=16, batch_size=3, seed=0)

    straight = batches()
    expected = [next(straight) for _ in range(12)]
    for stop in (1, 5, 8):
        first = batches()
        for _ in range(stop):
            next(first)
        second = batches()
        second.set_state(first.get_state())
        for want in expected[stop:]:
            got = next(second)
            assert all(np.array_equal(got[key], want[key]) for key in want)


def test_mixture_weights(folder):
    batches = make_batches(sources(folder), Bytes(), length=16, batch_size=8, seed=0)
    tokens = np.concatenate([next(batches)["tokens"] for _ in range(10)])
    share = np.mean([np.sum(row == ord("a")) > 8 for row in tokens])
    assert abs(share - 0.75) < 0.1
