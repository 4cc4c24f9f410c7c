"""Packing, mixing, resuming and sharing out of training data."""

import itertools
import json
import os

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from pallas_kernels.math.spec import NEVER
from swa_jax.base.errors import ConfigError
from swa_jax.data.batches import make_batches
from swa_jax.data.documents import Answered, document_hash, is_held_out
from swa_jax.data.packing import PackedPrompts, PackedText, _most_that_fit, pack
from swa_jax.data.sources import SourceConfig, text_files
from swa_jax.data.tokenizer import Tokenizer

# ---- packing ----


def documents():
    return [np.full(n, n, np.int32) for n in (5, 9, 3, 20, 7)]


def test_an_epoch_holds_every_token_once():
    packed = PackedText(documents(), 11, seed=0)
    assert packed.rows == 4
    for epoch in range(3):
        rows = [packed[epoch * packed.rows + i]["tokens"] for i in range(packed.rows)]
        assert np.array_equal(np.sort(np.concatenate(rows)), np.sort(np.concatenate(documents())))
    assert not np.array_equal(packed[0]["tokens"], packed[packed.rows]["tokens"])  # shuffled anew


def test_two_equal_sources_do_not_give_equal_samples(tokenizer):
    twice = [SourceConfig("dictionary")] * 2
    batch = next(make_batches(twice, tokenizer, length=64, batch_size=8, seed=0))
    assert len({row.tobytes() for row in batch["tokens"]}) == 8


def test_too_little_text_is_refused():
    with pytest.raises(ConfigError, match="44 tokens, less than one row of sequence_length = 64"):
        PackedText(documents(), 64, seed=0)


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=60)


def numbered(sizes):
    """Documents in which no token occurs twice."""
    ends = np.cumsum(sizes)
    return [np.arange(end - size, end, dtype=np.int32) for size, end in zip(sizes, ends, strict=True)]


@given(SIZES, st.integers(1, 50), st.integers(0, 3))
@settings(deadline=None)
def test_rows_of_text_for_any_documents(sizes, length, seed):
    if sum(sizes) < length:
        return
    packed = PackedText(numbered(sizes), length, seed)
    rows = [packed[i] for i in range(packed.rows)]
    tokens = np.concatenate([row["tokens"] for row in rows])
    assert len(set(tokens.tolist())) == len(tokens) == sum(sizes) // length * length
    document = np.repeat(np.arange(len(sizes)), sizes)
    for row in rows:
        ids, of = row["segment_ids"], document[row["tokens"]]
        assert ids[0] == 1
        assert row["tokens"].dtype == ids.dtype == np.int32
        assert np.array_equal(np.diff(ids), np.diff(of) != 0)  # one more exactly where another document begins
        assert ids[-1] <= packed.max_segments()
        inside = np.diff(row["tokens"])[np.diff(ids) == 0]
        assert np.all(inside == 1)  # a segment is an unbroken piece of its document


@given(SIZES, st.integers(-2, 50))
@settings(deadline=None)
def test_how_many_documents_fit_into_a_row(sizes, room):
    sums = np.cumsum(sorted(sizes))
    assert _most_that_fit(np.array(sizes), room) == np.count_nonzero(sums <= room)


@given(SIZES, st.integers(1, 50))
@settings(deadline=None)
def test_text_read_in_order_is_whole_and_ends_in_padding(sizes, length):
    packed = PackedText(numbered(sizes), length, seed=None)
    rows = [packed[i] for i in range(len(packed))]
    tokens, ids, weights = (np.concatenate([r[name] for r in rows]) for name in ("tokens", "segment_ids", "weights"))
    total = sum(sizes)
    assert np.array_equal(tokens[:total], np.arange(total))
    assert np.all(ids[:total] > 0)
    assert not np.any(ids[total:])
    assert np.array_equal(weights, ids > 0)
    assert len(tokens) - total < length


@given(SIZES, st.integers(40, 80))
def test_pack_shares_out_everything_within_the_length(sizes, length):
    rows = pack(sizes, length)
    assert sorted(itertools.chain(*rows)) == list(range(len(sizes)))
    filled = [sum(sizes[i] for i in row) for row in rows]
    assert max(filled) <= length
    for i, j in itertools.combinations(range(len(rows)), 2):  # two rows are never less than one row's worth
        assert filled[i] + filled[j] > length


@given(
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=40),
    st.integers(2, 50),
    st.sampled_from([None, 0, 1]),
)
@settings(deadline=None)
def test_rows_of_prompts_for_any_examples(shapes, length, seed):
    arrays = numbered([head + answer for head, answer in shapes])
    prompts = [Answered(array + 1, head) for array, (head, _) in zip(arrays, shapes, strict=True)]
    fitting = {int(p.tokens[0]): p for p in prompts if len(p.tokens) <= length}
    if not fitting:
        return
    packed = PackedPrompts(prompts, length, seed)
    assert packed.too_long == len(prompts) - len(fitting)
    for epoch in range(1 if seed is None else 2):
        seen = []
        for i in range(packed.rows):
            row = packed[epoch * packed.rows + i]
            ids = row["segment_ids"]
            assert len(row["full_from"]) == ids.max() <= packed.max_segments()
            for segment in range(1, ids.max() + 1):
                [where] = np.nonzero(ids == segment)
                tokens = row["tokens"][where]
                prompt = fitting[int(tokens[0])]
                seen.append(int(tokens[0]))
                assert np.array_equal(tokens, prompt.tokens)
                assert row["full_from"][segment - 1] == prompt.boundary
                assert np.array_equal(row["weights"][where], np.arange(len(tokens)) >= prompt.boundary)
            assert not np.any(row["tokens"][ids == 0])
            assert not np.any(row["weights"][ids == 0])
        assert sorted(seen) == sorted(fitting)


def test_prompts_that_are_too_long_are_counted(caplog):
    prompts = [Answered(np.ones(n, np.int32), 1) for n in (5, 30, 40)]
    assert PackedPrompts(prompts, 20, seed=0).too_long == 2
    assert "2 of 3 prompts are longer than sequence_length = 20 and are left out" in caplog.text
    with pytest.raises(ConfigError, match="none of the 3 prompts fits sequence_length = 4"):
        PackedPrompts(prompts, 4, seed=0)


# ---- files ----


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
    (folder / "e[1].txt").write_text("e")
    assert [f.name for f in text_files([f"{folder}/e[1].txt"])] == ["e[1].txt"]
    with pytest.raises(ConfigError, match=r"'nowhere\.txt': no such file"):
        text_files(["nowhere.txt"])


def test_a_folder_is_searched_to_the_bottom(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("other[1]")
    (other / "f.txt").write_text("f")
    (folder / "code.py").mkdir()
    (folder / "code.py" / "g.py").write_text("g")
    (folder / "linked").symlink_to(other)
    (folder / "again").symlink_to(folder)  # leads to every file once more, and in a circle
    (folder / "gone.txt").symlink_to("nowhere")  # reading it says so
    names = ["a.txt", "b.md", "c.txt", "g.py", "empty.txt", "gone.txt", "f.txt"]
    assert [f.name for f in text_files([str(folder)])] == names
    assert [f.name for f in text_files([str(other)])] == ["f.txt"]


# ---- batches ----


def sources(folder):
    return [SourceConfig(files=(f"{folder}/a.txt",), weight=3.0), SourceConfig(files=(f"{folder}/b.md",))]


def mixture(folder):
    """Text, prompts and a generated lesson."""
    lines = [json.dumps({"prompt": "p" * n, "answer": "a" * (7 - n)}) for n in (1, 2, 3, 4, 5)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return [
        *sources(folder),
        SourceConfig("prompts", (f"{folder}/prompts.jsonl",), weight=2.0),
        SourceConfig("repeats", (f"{folder}/c.txt",)),
    ]


def take(batches, count):
    return [next(batches) for _ in range(count)]


def assert_same(left, right):
    assert len(left) == len(right)
    for one, other in zip(left, right, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert one[name].dtype == other[name].dtype
            assert np.array_equal(one[name], other[name])


def batches_of(folder, tokenizer, **changes):
    return make_batches(mixture(folder), tokenizer, **dict(length=16, batch_size=8, seed=0) | changes)


def test_equal_arguments_give_equal_batches_and_another_seed_others(folder, tokenizer):
    one, two, other = (take(batches_of(folder, tokenizer, seed=seed), 12) for seed in (0, 0, 1))
    assert_same(one, two)
    assert any(not np.array_equal(a["tokens"], b["tokens"]) for a, b in zip(one, other, strict=True))


def test_a_batch_has_what_training_needs(folder, tokenizer):
    for batch in take(batches_of(folder, tokenizer), 5):
        assert {name: (array.shape, str(array.dtype)) for name, array in batch.items()} == {
            "tokens": ((8, 16), "int32"),
            "segment_ids": ((8, 16), "int32"),
            "weights": ((8, 16), "float32"),
            "full_from": ((8, 2), "int32"),  # no row has more than two segments, of text nor of prompts
        }
        for row in range(8):
            learned = batch["weights"][row] > 0
            for segment in range(1, batch["segment_ids"][row].max() + 1):
                boundary = batch["full_from"][row, segment - 1]
                [places] = np.nonzero(batch["segment_ids"][row] == segment)
                if boundary != NEVER:  # the first learned token of its segment
                    assert np.flatnonzero(learned[places])[0] == boundary
    assert "full_from" not in next(make_batches(sources(folder), tokenizer, length=16, batch_size=2, seed=0))


@pytest.mark.parametrize("stop", [1, 8])
def test_resuming_reads_exactly_the_batches_that_follow(folder, tokenizer, stop):
    expected = take(batches_of(folder, tokenizer), 12)
    first = batches_of(folder, tokenizer)
    take(first, stop)
    state = json.loads(json.dumps(first.get_state()))
    assert state["batches"] == stop
    second = batches_of(folder, tokenizer)
    take(second, 3)  # what it has read before does not matter
    second.set_state(state)
    assert_same(take(second, 12 - stop), expected[stop:])
    second.set_state(state)
    assert_same(take(second, 12 - stop), expected[stop:])


def global_batches(hosts, count):
    """The rows that each host reads, put together."""
    parts = [take(host, count) for host in hosts]
    return [{name: np.concatenate([part[i][name] for part in parts]) for name in parts[0][i]} for i in range(count)]


def hosts_of(folder, tokenizer, number):
    size = 8 // number
    return [batches_of(folder, tokenizer, rows=slice(i * size, (i + 1) * size)) for i in range(number)]


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (1, 1)])
def test_another_number_of_hosts_neither_loses_nor_repeats_a_sample(folder, tokenizer, before, after):
    expected = take(batches_of(folder, tokenizer), 9)
    old, new = hosts_of(folder, tokenizer, before), hosts_of(folder, tokenizer, after)
    done = global_batches(old, 5)
    states = [host.get_state() for host in old]
    assert all(state == states[0] for state in states)
    for host in new:
        host.set_state(states[0])
    assert_same(done + global_batches(new, 4), expected)


def test_rows_must_be_a_run_of_the_batch(folder, tokenizer):
    for rows in (slice(8, 16), slice(0, 8, 2), slice(3, 3)):
        with pytest.raises(ConfigError, match="not a run of the 8 rows of a global batch"):
            batches_of(folder, tokenizer, rows=rows)


def test_a_state_of_other_data_is_refused_by_name(folder, tokenizer):
    state = batches_of(folder, tokenizer).get_state()
    for change, sentence in [
        (dict(batch_size=4), "'batch_size' was 8 and is now 4"),
        (dict(length=17), "'sequence_length' was 16 and is now 17"),
        (dict(seed=1), "'seed' was 0 and is now 1"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            batches_of(folder, tokenizer, **change).set_state(state)
    with pytest.raises(ConfigError, match="'number of sources' was 4 and is now 2"):
        make_batches(sources(folder), tokenizer, length=16, batch_size=8, seed=0).set_state(state)
    with pytest.raises(ConfigError, match="its state is not one that make_batches's iterator gave"):
        batches_of(folder, tokenizer).set_state({"next_index": 3})
    other = Tokenizer(tokenizer.backend)  # without an end-of-text token
    assert other.vocab_size == tokenizer.vocab_size
    with pytest.raises(ConfigError, match="'tokenizer' was"):
        batches_of(folder, other).set_state(state)


@pytest.mark.parametrize("file", ["a.txt", "b.md", "c.txt"])
def test_an_edit_of_the_same_size_at_the_same_time_is_noticed(folder, tokenizer, file):
    state = json.loads(json.dumps(batches_of(folder, tokenizer).get_state()))
    batches_of(folder, tokenizer).set_state(state)
    before = (folder / file).stat()
    text = (folder / file).read_text()
    (folder / file).write_text(text[:-3] + chr(ord(text[-3]) ^ 1) + text[-2:])
    os.utime(folder / file, ns=(before.st_atime_ns, before.st_mtime_ns))
    after = (folder / file).stat()
    assert (after.st_size, after.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(ConfigError, match=r"'data\.\d\.files' was \w+ and is now \w+"):
        batches_of(folder, tokenizer).set_state(state)


def test_files_may_move(folder, tokenizer, tmp_path_factory):
    batches = batches_of(folder, tokenizer)
    state = batches.get_state()
    expected = next(batches)["tokens"]
    moved = tmp_path_factory.mktemp("elsewhere")
    for file in folder.iterdir():
        file.rename(moved / file.name)
    batches = batches_of(moved, tokenizer)
    batches.set_state(state)
    np.testing.assert_array_equal(next(batches)["tokens"], expected)


def test_mixture_weights(folder, tokenizer):
    batches = make_batches(sources(folder), tokenizer, length=16, batch_size=8, seed=0)
    tokens = np.concatenate([next(batches)["tokens"] for _ in range(10)])
    [letter] = tokenizer.encode("a")
    share = np.mean([np.sum(row == letter) > 8 for row in tokens])
    assert abs(share - 0.75) < 0.1


def test_bad_shares_are_refused():
    for changes, sentence in [
        (dict(weight=0.0), "'weight' must be above 0, got 0.0"),
        (dict(held_out=1.0), "'held_out' must be a share from 0 to below 1, got 1.0"),
        (dict(kind="needles", held_out=0.1), "kind 'needles' has no documents to hold out"),
        (dict(kind="tokens"), "kind 'tokens' needs its 'files' named"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            SourceConfig(**changes)


def test_an_error_while_reading_ahead_loses_no_batch(folder, tokenizer, monkeypatch):
    expected = take(batches_of(folder, tokenizer), 6)
    batches = batches_of(folder, tokenizer)
    take(batches, 2)

    def fail(self, index):
        raise OSError("the disk is away for a moment")

    batches.set_state(batches.get_state())  # drops what is read ahead
    with monkeypatch.context() as away:
        away.setattr(PackedText, "__getitem__", fail)
        with pytest.raises(OSError, match="away for a moment"):
            take(batches, 4)
    done = batches.get_state()["batches"]
    assert_same(take(batches, 6 - done), expected[done:])


# ---- held-out documents ----


@pytest.fixture
def many(tmp_path):
    lines = [json.dumps({"text": f"document {i} " * (1 + i % 5)}) for i in range(200)]
    (tmp_path / "many.jsonl").write_text("\n".join(lines))
    return SourceConfig(files=(f"{tmp_path}/many.jsonl",), held_out=0.2)


def texts_in(batches, tokenizer):
    """The whole documents, cut rows included, in the order they were read in."""
    ids = np.concatenate([batch["tokens"][batch["segment_ids"] > 0] for batch in batches])
    ends = np.flatnonzero(ids == tokenizer.eos_id)
    return [tokenizer.decode(part) for part in np.split(ids, ends + 1)[:-1]]


def test_held_out_documents_are_read_once_in_order_and_never_trained_on(many, tokenizer):
    everything = [f"document {i} " * (1 + i % 5) for i in range(200)]
    held = make_batches([many], tokenizer, length=64, batch_size=4, seed=0, held_out=True)
    batches = list(held)
    assert all(batch["tokens"].shape == (4, 64) for batch in batches)
    texts = texts_in(batches, tokenizer)
    assert 20 < len(texts) < 60  # 40 expected
    assert texts == [text for text in everything if text in set(texts)]
    with pytest.raises(StopIteration):
        next(held)
    assert all(np.array_equal(batch["weights"], batch["segment_ids"] > 0) for batch in batches)

    training = make_batches([many], tokenizer, length=64, batch_size=4, seed=0)
    rows = training._batches.samples.rows  # an epoch
    trained = set(texts_in(take(training, rows // 4 * 2), tokenizer))
    assert not trained & set(texts)
    # Rows begin and end within documents: nearly all others are seen whole within two epochs.
    assert len(trained & set(everything)) > 0.9 * (200 - len(texts))


def test_held_out_batches_resume_and_are_shared_out(many, tokenizer):
    def read(rows=None):
        sources = [many, SourceConfig("dictionary")]
        return make_batches(sources, tokenizer, length=64, batch_size=4, seed=0, rows=rows, held_out=True)

    expected = list(read())
    first = read()
    take(first, 2)
    second = read()
    second.set_state(first.get_state())
    assert_same(list(second), expected[2:])
    halves = [read(slice(0, 2)), read(slice(2, 4))]
    assert_same(global_batches(halves, len(expected)), expected)
    assert all(next(half, None) is None for half in halves)


def test_every_source_has_its_share_of_the_first_held_out_batches(many, tokenizer, tmp_path):
    """A validation reads no more than the first."""
    lines = [json.dumps({"text": f"other {i} " * 3}) for i in range(60)]
    (tmp_path / "few.jsonl").write_text("\n".join(lines))
    sources = [many, SourceConfig(files=(f"{tmp_path}/few.jsonl",), held_out=0.3)]

    def rows(sources):
        batches = list(make_batches(sources, tokenizer, length=64, batch_size=2, seed=0, held_out=True))
        return [row.tolist() for batch in batches for row in batch["tokens"] if row.any()]

    first, second, both = rows(sources[:1]), rows(sources[1:]), rows(sources)
    assert sorted(both) == sorted(first + second)
    assert [row for row in both if row in first] == first
    half = both[: len(both) // 2]
    assert abs(sum(row in second for row in half) - len(second) / 2) <= 1


def test_nothing_held_out_is_an_error(folder, tokenizer):
    with pytest.raises(ConfigError, match="no source holds anything out"):
        make_batches(sources(folder), tokenizer, length=16, batch_size=2, seed=0, held_out=True)
    single = SourceConfig(files=(f"{folder}/a.txt",), held_out=1e-6)
    with pytest.raises(ConfigError, match=r"of the 1 documents of .* leaves none to hold out"):
        make_batches([single], tokenizer, length=16, batch_size=2, seed=0, held_out=True)


def test_equal_documents_fall_on_the_same_side():
    hashes = np.array([document_hash(np.arange(n)) for n in range(2000)], np.uint64)
    assert document_hash(np.arange(5)) == document_hash(np.arange(5, dtype=np.uint16))
    assert abs(is_held_out(hashes, 0.25).mean() - 0.25) < 0.04
    assert np.all(is_held_out(hashes, 0.25) <= is_held_out(hashes, 0.5))  # a larger share holds out those, too
