"""Files that are whole or not there, and their sums."""

import errno
import hashlib
import os
import re
from pathlib import Path

import pytest

from swa_jax.base import files
from swa_jax.base.errors import CheckpointError, ConfigError

ROOT = Path(__file__).parents[2]


def test_what_is_written_is_read_back(tmp_path):
    files.write_text(tmp_path / "a.txt", "naïve\n")
    assert (tmp_path / "a.txt").read_bytes() == "naïve\n".encode()  # UTF-8, whatever the locale
    files.write_bytes(tmp_path / "b", b"\x00\xff")
    assert (tmp_path / "b").read_bytes() == b"\x00\xff"
    files.write_json(tmp_path / "c.json", {"b": [1, None], "a": "é"})
    assert files.read_json(tmp_path / "c.json") == {"b": [1, None], "a": "é"}
    assert (tmp_path / "c.json").read_text().endswith("}\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "b", "c.json"]


@pytest.mark.parametrize("fault", ["fsync", "replace"])
def test_a_disk_that_is_full_leaves_the_file_of_before_and_nothing_else(tmp_path, monkeypatch, fault):
    file = tmp_path / "results.json"
    files.write_text(file, "before")

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, fault, full)
    with pytest.raises(OSError, match="No space") as caught:
        files.write_text(file, "after")
    assert caught.value.filename == str(file)
    assert file.read_text() == "before"
    assert list(tmp_path.iterdir()) == [file]


def test_the_bytes_are_on_the_disk_before_the_name(tmp_path, monkeypatch):
    """Else a machine that loses its power keeps an empty file under the name."""
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (done.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replace"), replace(*paths)))
    files.write_bytes(tmp_path / "x", b"1")
    assert done == ["fsync", "replace"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not valid JSON: "),
        (b"\xff\xfe", r"is not UTF-8: invalid start byte \(byte 1\)"),
        (b'{"a": "\xed\xa0\xbd"}', "is not UTF-8: "),
        (b'{"a":\n 1 2}', r"is not valid JSON: Expecting ',' delimiter \(line 2, column 4\)"),
        (b'{"a": [1\n', r"is not valid JSON: Expecting ',' delimiter \(line 1, column 9\)"),
        (b"[1]", "must hold a JSON object"),
        (b'{"a": 1, "b": 2, "a": 3}', "has the key 'a' twice"),
        (b'{"a": {"b": 1, "b": 1}}', "has the key 'b' twice"),
        (b"[" * 100_000, "is not valid JSON for us: its lists and objects lie too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON for us: a whole number in it has thousands of digits"),
        (b'{"a": "\\ud83d b"}', r"is not valid JSON: '\\ud83d' alone is half a character"),
    ],
)
def test_json_that_is_none_names_the_file(tmp_path, content, words):
    file = tmp_path / "a.json"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(str(file)) + " " + words):
        files.read_json(file)
    with pytest.raises(CheckpointError, match=words):
        files.read_json(file, CheckpointError)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have(number):
    data = f'{{"a": [{number}]}}'.encode()
    assert len(files.parse_json(data, "it")["a"]) == 1  # what we write ourselves may have them
    with pytest.raises(ConfigError, match=f"it holds the number {number}, which is none that can be used"):
        files.parse_json(data, "it", finite=True)
    assert files.parse_json(b'{"a": "\\ud83d\\ude00", "b": 1e300}', "it", finite=True) == {
        "a": "\U0001f600",
        "b": 1e300,
    }


@pytest.mark.parametrize("size", [0, 1, (1 << 22) + 3])
def test_sums_are_sha_256(tmp_path, size):
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    (tmp_path / "x").write_bytes(data)
    seen = []
    expected = hashlib.sha256(data).hexdigest()
    assert files.sum_of_file(tmp_path / "x") == files.sum_of(data) == expected
    assert files.sum_of_file(tmp_path / "x", flush=True, progress=seen.append) == expected
    assert sum(seen) == size


def test_the_sum_of_a_value_is_that_of_its_content():
    assert files.sum_of_json({"a": 1, "b": [2]}) == files.sum_of_json({"b": (2,), "a": 1})
    assert files.sum_of_json(["é"]) == hashlib.sha256(b'["\\u00e9"]').hexdigest()


def test_a_new_folder_appears_whole(tmp_path):
    destination = files.check_destination(tmp_path / "new")
    with files.new_folder(destination) as folder:
        (folder / "weights").write_text("1")
        assert not destination.exists()
    assert [path.name for path in destination.iterdir()] == ["weights"]
    assert list(tmp_path.iterdir()) == [destination]


def test_a_new_folder_that_fails_is_gone(tmp_path):
    def broken():
        with files.new_folder(tmp_path / "new") as folder:
            (folder / "weights").write_text("1")
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert list(tmp_path.iterdir()) == []


def test_files_of_others_are_not_touched(tmp_path):
    (tmp_path / "new.partial").mkdir()
    (tmp_path / "new.partial" / "thesis.txt").write_text("1")
    with pytest.raises(CheckpointError, match=r"new\.partial is in the way"), files.new_folder(tmp_path / "new"):
        pass
    assert (tmp_path / "new.partial" / "thesis.txt").exists()
    with pytest.raises(CheckpointError, match="is there already"):
        files.check_destination(tmp_path)
    (tmp_path / "empty").mkdir()
    assert files.check_destination(tmp_path / "empty") == (tmp_path / "empty").resolve()


@pytest.mark.parametrize("place", ["gs://bucket/run", Path("gs://bucket/run"), "s3://a/b", "hdfs://host/data"])
def test_a_bucket_is_no_folder(place):
    with pytest.raises(ConfigError, match="is the address of a bucket"):
        files.check_local(place, "the output")


@pytest.mark.parametrize("place", ["gs", "runs/gs:1", Path("/data/s3"), "C:/data", ""])
def test_a_folder_is_no_bucket(place):
    files.check_local(place, "the output")


def test_nobody_else_writes_and_renames():
    """One module knows how: the others say what."""
    theirs = {
        "swa_jax/base/files.py",
        "swa_jax/train/run_checkpoints.py",  # folders that Orbax has written get their names
        "swa_jax/data/tokenize.py",  # a shard is written for hours, and renamed when it is full
    }
    found = {
        path.relative_to(ROOT).as_posix()
        for folder in ("swa_jax", "launch", "pallas_kernels", "scripts")
        for path in (ROOT / folder).rglob("*.py")
        if re.search(r"os\.(replace|rename)\(|\.rename\(|NamedTemporaryFile", path.read_text())
    }
    assert found == theirs


def test_a_folder_has_one_writer(tmp_path):
    second = files.new_folder(tmp_path / "a", "the same")
    refused = pytest.raises(CheckpointError, match=r"another process is writing .*a\.partial: wait for it")
    with files.new_folder(tmp_path / "a", "the same"), refused, second:
        pass
    with files.new_folder(tmp_path / "b"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
