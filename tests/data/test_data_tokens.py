"""Tokenising ahead: the same rows as reading the text, exact continuation, and damage that is found and named."""

import dataclasses
import errno
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from command_line import run

import swa_jax.data.stored
import swa_jax.data.tokenize
from swa_jax.base.errors import ConfigError
from swa_jax.data.batches import make_batches
from swa_jax.data.documents import read_documents
from swa_jax.data.sources import SourceConfig
from swa_jax.data.stored import StoredDocuments, read_manifest, verify
from swa_jax.data.tokenize import tokenize
from swa_jax.data.tokenizer import load_tokenizer, train_byte_bpe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def corpus(tmp_path):
    """A source of 300 documents, some empty, in three files."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for part in range(3):
        lines = [{"text": f"document {part} {i} " * (i % 7)} for i in range(100)]
        (folder / f"{part}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return SourceConfig(files=(str(folder),))


@pytest.fixture
def made(corpus, byte_tokenizer, tmp_path):
    """The corpus in shards of about 2000 tokens."""
    out = tmp_path / "tokens"
    tokenize(corpus, byte_tokenizer, out, shard_tokens=2000)
    return out


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def as_source(folder, **changes):
    return SourceConfig("tokens", (str(folder),), **changes)


def batches_of(source, tokenizer, **changes):
    return make_batches([source], tokenizer, **dict(length=64, batch_size=4, seed=0) | changes)


# ---- what comes out ----


def test_the_documents_are_those_of_the_text(corpus, made, tokenizer):
    stored = StoredDocuments([made], tokenizer)
    files = tuple(sorted(Path(corpus.files[0]).iterdir()))
    read = read_documents(files, tokenizer)
    assert len(stored) == len(read) > 200
    assert all(np.array_equal(stored[i], read[i]) for i in range(len(read)))
    assert stored.sizes.tolist() == [len(document) for document in read]
    manifest = read_manifest(made)
    assert manifest["documents"] == len(read)
    assert manifest["tokens"] == stored.sizes.sum()
    assert manifest["left_out"] == 300 - len(read)
    assert len(manifest["shards"]) > 5
    assert sorted(contents(made)) == sorted(
        ["manifest.json", "tokenizer.json"] + [shard[key] for shard in manifest["shards"] for key in ("name", "index")]
    )


@pytest.mark.parametrize("held_out", [False, True])
def test_the_batches_are_those_of_the_text(corpus, made, tokenizer, held_out):
    direct = SourceConfig(files=corpus.files, held_out=0.3)
    read, stored = (
        batches_of(source, tokenizer, held_out=held_out) for source in (direct, as_source(made, held_out=0.3))
    )
    pairs = list(zip(read, stored, strict=True)) if held_out else [(next(read), next(stored)) for _ in range(40)]
    assert len(pairs) > 5
    for one, other in pairs:
        assert all(np.array_equal(one[name], other[name]) for name in one)


def test_several_folders_are_one_source(made, corpus, byte_tokenizer, tokenizer, tmp_path):
    tokenize(SourceConfig(files=(f"{corpus.files[0]}/1.jsonl",)), byte_tokenizer, tmp_path / "more")
    alone, more = (StoredDocuments([folder]) for folder in (made, tmp_path / "more"))
    both = StoredDocuments([made, tmp_path / "more"], tokenizer)
    assert len(both) == len(alone) + len(more)
    for i in (0, len(alone) - 1, len(alone), len(both) - 1):
        expected = alone[i] if i < len(alone) else more[i - len(alone)]
        assert np.array_equal(both[i], expected)


def test_a_large_vocabulary_takes_four_bytes(tmp_path, byte_tokenizer):
    data = json.loads(byte_tokenizer.read_text())
    data["model"]["vocab"] |= {f"word{i}": 300 + i for i in range(70000)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    (tmp_path / "a.txt").write_text("hello")
    manifest = tokenize(SourceConfig(files=(f"{tmp_path}/a.txt",)), tmp_path, tmp_path / "out")
    assert manifest["dtype"] == "<u4"
    tokenizer = load_tokenizer(tmp_path)
    assert StoredDocuments([tmp_path / "out"], tokenizer)[0].tolist() == [*tokenizer.encode("hello"), tokenizer.eos_id]


def test_opening_reads_no_shard(made, monkeypatch):
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda file, *a: opened.append(Path(file).name) or real(file, *a))
    stored = StoredDocuments([made])
    assert not opened
    stored[0], stored[1]
    assert opened == ["00000.tokens"]


def test_few_files_are_open_at_a_time(made, monkeypatch):
    """Of all folders together: a mixture has many."""
    stored = swa_jax.data.stored
    monkeypatch.setattr(stored, "_opened", functools.lru_cache(maxsize=2)(stored._opened.__wrapped__))
    sources = [StoredDocuments([made]) for _ in range(3)]
    before = len(os.listdir("/proc/self/fd"))
    first = [[source[i].tolist() for source in sources] for i in range(len(sources[0]))]
    assert len(os.listdir("/proc/self/fd")) == before + 2
    again = [[source[i].tolist() for source in sources] for i in reversed(range(len(sources[0])))]
    assert again == first[::-1]
    stored._opened.cache_clear()
    assert len(os.listdir("/proc/self/fd")) == before


def test_reads_wait_beside_each_other(made, tokenizer, monkeypatch):
    """Those of a bucket take tens of milliseconds: one after the other, they would take longer than a step."""
    beside = {os.open: [], os.pread: [], Path.read_bytes: []}

    def slow(real):
        waiting = []

        def read(*arguments):
            waiting.append(1)
            time.sleep(0.05)
            beside[real].append(len(waiting))
            waiting.pop()
            return real(*arguments)

        return read

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", slow(os.open))
        patched.setattr(os, "pread", slow(os.pread))
        patched.setattr(Path, "read_bytes", slow(Path.read_bytes))
        batches = batches_of(as_source(made), tokenizer, batch_size=1, length=16)
        first = [next(batches)["tokens"].tolist() for _ in range(2)]
        batches.close()
    assert min(max(counts) for counts in beside.values()) > 2
    again = batches_of(as_source(made), tokenizer, batch_size=1, length=16)
    assert [next(again)["tokens"].tolist() for _ in range(2)] == first
    again.close()


def test_a_document_longer_than_rows_is_read_once(tmp_path, byte_tokenizer, tokenizer, monkeypatch):
    (tmp_path / "long.txt").write_text("abc" * 1000)
    tokenize(SourceConfig(files=(f"{tmp_path}/long.txt",)), byte_tokenizer, tmp_path / "out")
    reads = []
    real = StoredDocuments._read
    monkeypatch.setattr(
        StoredDocuments, "_read", lambda self, *a: reads.append((threading.get_ident(), a)) or real(self, *a)
    )
    batches = batches_of(as_source(tmp_path / "out"), tokenizer)
    for _ in range(30):
        next(batches)
    batches.close()
    readers = [thread for thread, what in reads if what == (0, 0, 3001)]  # not those of an earlier test
    assert 0 < len(readers) == len(set(readers)), "by each thread"


def test_a_disk_that_is_away_for_a_moment_ends_no_run(made, monkeypatch, caplog):
    stored = StoredDocuments([made])
    expected = stored[0].tolist()
    monkeypatch.setattr(swa_jax.data.stored, "READ_PAUSES", (0, 0, 0))
    real, failures = os.pread, [errno.EIO, errno.ESTALE]

    def read(*arguments):
        if failures:
            number = failures.pop()
            raise OSError(number, os.strerror(number))
        return real(*arguments)

    monkeypatch.setattr(os, "pread", read)
    other = StoredDocuments([made])
    assert other[0].tolist() == expected
    assert "00000.tokens cannot be read: Stale file handle" in caplog.text
    failures += [errno.EIO] * 3
    with pytest.raises(ConfigError, match=r"00000\.tokens cannot be read: Input/output error; see to its disk"):
        other[1]


# ---- interruptions ----


class Interruption(Exception):
    pass


@pytest.mark.parametrize("after", [1, 150])
def test_an_interrupted_run_goes_on_to_the_same_bytes(corpus, made, byte_tokenizer, tmp_path, monkeypatch, after):
    out = tmp_path / "again"
    real, seen = swa_jax.data.tokenize.document_hash, []

    def interrupted(tokens):
        seen.append(1)
        if len(seen) == after:
            raise Interruption
        return real(tokens)

    monkeypatch.setattr(swa_jax.data.tokenize, "document_hash", interrupted)
    monkeypatch.setattr(swa_jax.data.documents, "BATCH_TEXTS", 7)
    with pytest.raises(Interruption):
        tokenize(corpus, byte_tokenizer, out, shard_tokens=2000)
    assert not list(out.glob("*.partial"))
    with pytest.raises(ConfigError, match="is not finished: run `swa-jax data tokenize` on it again"):
        StoredDocuments([out])
    tokenize(corpus, byte_tokenizer, out, shard_tokens=2000)
    assert contents(out) == contents(made)
    if after == 150:
        assert len(seen) - after < len(StoredDocuments([made])) - 100  # finished shards are not done again


@pytest.mark.parametrize("bad", [40, 150])  # in a file of which shards are done, and in one that is not begun
def test_what_is_not_read_yet_may_be_mended(corpus, byte_tokenizer, tmp_path, monkeypatch, bad):
    monkeypatch.setattr(swa_jax.data.documents, "BATCH_TEXTS", 7)
    out, file = tmp_path / "again", Path(corpus.files[0]) / f"{bad // 100}.jsonl"
    whole = file.read_text()
    lines = whole.split("\n")
    file.write_text("\n".join([*lines[: bad % 100], "{", *lines[bad % 100 :]]))
    with pytest.raises(ConfigError, match=rf"{bad // 100}\.jsonl, line {bad % 100 + 1} is not valid JSON"):
        tokenize(corpus, byte_tokenizer, out, shard_tokens=700)
    assert json.loads((out / "unfinished.json").read_text())["shards"]
    file.write_text(whole)
    first = Path(corpus.files[0]) / "0.jsonl"
    kept = first.read_text()
    first.write_text(kept.replace('{"text": ""}\n', "", 1))  # what is done stands elsewhere
    with pytest.raises(ConfigError, match=r"0\.jsonl.* is not the same"):
        tokenize(corpus, byte_tokenizer, out, shard_tokens=700)
    first.write_text(kept)
    tokenize(corpus, byte_tokenizer, out, shard_tokens=700)
    tokenize(corpus, byte_tokenizer, tmp_path / "whole", shard_tokens=700)
    assert contents(out) == contents(tmp_path / "whole")


def test_sigkill_leaves_what_the_next_run_completes(corpus, made, byte_tokenizer, tmp_path):
    out = tmp_path / "killed"
    program = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "import swa_jax.data.tokenize as t\n"
        "from swa_jax.data.sources import SourceConfig\n"
        "real = t.document_hash\n"
        "t.document_hash = lambda tokens: time.sleep(0.02) or real(tokens)\n"
        "t.tokenize(SourceConfig(files=(sys.argv[1],)), Path(sys.argv[2]), Path(sys.argv[3]), shard_tokens=2000)\n"
    )
    arguments = [sys.executable, "-c", program, corpus.files[0], str(byte_tokenizer), str(out)]
    process = subprocess.Popen(arguments, cwd=ROOT)
    try:
        limit = time.monotonic() + 60
        while not (out / "00001.tokens").exists():
            assert process.poll() is None
            assert time.monotonic() < limit
            time.sleep(0.01)
        with pytest.raises(ConfigError, match="another process is tokenising into"):
            tokenize(corpus, byte_tokenizer, out, shard_tokens=2000)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert not (out / "manifest.json").exists()
    tokenize(corpus, byte_tokenizer, out, shard_tokens=2000)
    assert contents(out) == contents(made)


def test_a_full_disk_keeps_the_finished_shards(corpus, made, byte_tokenizer, tmp_path, monkeypatch):
    out = tmp_path / "full"
    real, calls = os.fsync, []

    def fsync(descriptor):
        calls.append(1)
        if len(calls) == 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(ConfigError, match=r"full: No space left on device; its [1-9]\d* finished shards stay"):
        tokenize(corpus, byte_tokenizer, out, shard_tokens=2000)
    tokenize(corpus, byte_tokenizer, out, shard_tokens=2000)
    assert contents(out) == contents(made)


def test_each_split_has_a_folder_of_its_own(byte_tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("swa_jax.data.tokenize.read_texts", lambda file, field, split: [f"of {split}"])
    (tmp_path / "set").mkdir()
    train, test = (SourceConfig("huggingface", (f"{tmp_path}/set",), split=split) for split in ("train", "test"))
    tokenize(train, byte_tokenizer, tmp_path / "tokens")
    with pytest.raises(ConfigError, match=r"other data \(split = train, not test\)"):
        tokenize(test, byte_tokenizer, tmp_path / "tokens")


def test_done_is_done_and_other_data_is_refused(corpus, made, byte_tokenizer, tmp_path):
    before = contents(made)
    tokenize(corpus, byte_tokenizer, made, shard_tokens=2000)
    assert contents(made) == before
    with pytest.raises(ConfigError, match=r"holds tokens of other data \(shard_tokens = 2000, not 3000\)"):
        tokenize(corpus, byte_tokenizer, made, shard_tokens=3000)
    as_dataset = dataclasses.replace(corpus, kind="huggingface")
    with pytest.raises(ConfigError, match=r"other data \(kind = text, not huggingface\)"):
        tokenize(as_dataset, byte_tokenizer, made, shard_tokens=2000)
    (Path(corpus.files[0]) / "1.jsonl").write_text('{"text": "short"}')
    with pytest.raises(ConfigError, match=r"3 files, and now 3: 1\.jsonl \(17 bytes\) is not the same"):
        tokenize(corpus, byte_tokenizer, made, shard_tokens=2000)
    assert contents(made) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match=r"other is not empty \(it has thesis\.tex\): name a new folder"):
        tokenize(corpus, byte_tokenizer, tmp_path / "other")


def test_a_mistake_in_the_first_shard_can_be_put_right(tmp_path, byte_tokenizer):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n{"text": ')
    source = SourceConfig(files=(str(file),))
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 2 is not valid JSON"):
        tokenize(source, byte_tokenizer, tmp_path / "out")
    file.write_text('{"text": "a"}\n{"text": "b"}')
    assert tokenize(source, byte_tokenizer, tmp_path / "out")["documents"] == 2
    file.write_text('{"text": ""}')
    with pytest.raises(ConfigError, match="every document is empty"):
        tokenize(source, byte_tokenizer, tmp_path / "empty")


# ---- damage ----


def test_another_tokenizer_is_refused(made):
    other = train_byte_bpe(["some text"], 260)
    with pytest.raises(
        ConfigError, match=r"was tokenised with another tokenizer \(.*, 257 tokens\) than this one \(260"
    ):
        batches_of(as_source(made), other)


def test_missing_empty_and_cut_shards_are_named(made):
    for name in ("00001.tokens", "00002.index"):
        file = made / name
        data = file.read_bytes()
        file.unlink()
        with pytest.raises(ConfigError, match=rf"{name} is missing, but the manifest beside it names it"):
            StoredDocuments([made])
        for part, state in ((b"", "empty"), (data[:-8], f"{len(data) - 8} bytes long")):
            file.write_bytes(part)
            with pytest.raises(ConfigError, match=rf"{name} is {state}, but was written with {len(data)} bytes"):
                StoredDocuments([made])
        file.write_bytes(data)
    StoredDocuments([made])


def test_any_flipped_bit_is_named_before_it_is_learned(made, tokenizer):
    rng = np.random.default_rng(0)
    good = contents(made)
    for name, data in good.items():
        if name == "tokenizer.json":  # only for decoding; training brings its own
            continue
        for _ in range(6):
            damaged = bytearray(data)
            damaged[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
            (made / name).write_bytes(damaged)
            with pytest.raises(ConfigError, match=rf"{name} is damaged"):
                verify(made)
            with pytest.raises(ConfigError, match=rf"{name} is damaged"):
                list(batches_of(as_source(made, held_out=1 - 1e-9), tokenizer, held_out=True))
        (made / name).write_bytes(data)
    verify(made)


def test_damage_met_in_training_stops_it_with_the_sentence(made, tokenizer):
    batches = batches_of(as_source(made), tokenizer)
    file = made / "00003.tokens"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(ConfigError, match=r"00003\.tokens is damaged: its document \d+ is not what was written"):
        list(itertools.islice(batches, 100))
    file.write_bytes(b"")  # cut short under the eyes of the reader
    with pytest.raises(ConfigError, match=r"00003\.tokens is damaged"):
        list(itertools.islice(batches, 100))


# ---- the command line ----


def test_tokenize_and_inspect_on_the_command_line(corpus, byte_tokenizer, tmp_path):
    out = tmp_path / "tokens"
    arguments = ("data", "tokenize", corpus.files[0], "--tokenizer", byte_tokenizer, "--out", out)
    output = run(*arguments)
    assert " tokens, 255 documents, 1 shards" in output
    assert "45 empty documents left out" in output
    assert run(*arguments) == output
    output = run("data", "inspect", out, "--rows", 1, "--length", 100)
    assert f"row 0: 100 of 100 tokens, {100 - output.count('\n  ')} learned" in output  # no segment's first
    assert "row 1:" not in output
    assert "document 1 " in output
    assert "every shard is as it was written" in output
    (out / "00000.tokens").write_bytes(b"")
    assert "00000.tokens is empty" in run("data", "inspect", out, status=2)
    assert "no field 'body'" in run(*arguments[:-1], tmp_path / "b", "--field", "body", status=2)


def test_inspect_a_configuration(byte_tokenizer, made, tmp_path):
    (tmp_path / "chat.jsonl").write_text(
        "\n".join(json.dumps({"prompt": f"{i} + {i} =", "answer": f" {2 * i}"}) for i in range(30))
    )
    stage = {"steps": 3, "sequence_length": 32, "batch_size": 4}
    config = {
        "output": str(tmp_path / "run"),
        "tokenizer": str(byte_tokenizer),
        "init_from": "nowhere",  # the model is not looked at
        "stages": [
            stage | {"data": [{"kind": "tokens", "files": [str(made)], "weight": 3, "held_out": 0.2}]},
            stage | {"data": [{"kind": "prompts", "files": [f"{tmp_path}/chat.jsonl"]}, {"kind": "dictionary"}]},
        ],
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    output = run("data", "inspect", tmp_path / "config.yaml", "--rows", 2)
    assert "stage 0: 3 steps of 4 x 32, 384 tokens" in output
    assert " + " in output
    assert "= >>>  " in output  # where the answer begins
    assert "no end" in output  # the dictionary
    assert "stages.0.steps=5" not in output
    assert "stage 0: 5 steps" in run("data", "inspect", tmp_path / "config.yaml", "stages.0.steps=5", "--rows", 0)
    assert "no such folder" in run("data", "inspect", tmp_path / "config.yaml", "stages.0.data.0.files=[x]", status=2)
    assert "unknown key" in run("data", "inspect", tmp_path / "config.yaml", "stagess=5", status=2)
