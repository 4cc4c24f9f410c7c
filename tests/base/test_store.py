"""What is kept belongs to content, a kill costs the record in work, and damage costs its own line and no other."""

import json

import numpy as np
import pytest

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import START_OVER, Store, check_content, digest, read_document, tell_found

CONTENT = {"sliding_window": 6, "weights": "a" * 64}


def made(file, count=16, content=CONTENT):
    store = Store(file, "scores", content)
    for i in range(count):
        store.add(f"{i:04b}", score=[i / 7, -i / 3], text="ü\u2028\n")
    return store


def test_records_are_found_again_and_replaced(tmp_path):
    file = tmp_path / "new" / "scores.jsonl"
    store = made(file)
    assert Store(file, "scores", CONTENT).records == store.records
    assert [json.loads(line)["key"] for line in file.read_text().split("\n")[1:-1]] == [f"{i:04b}" for i in range(16)]
    store.add("0011", score=None)
    again = Store(file, "scores", CONTENT)
    assert again.records == store.records
    assert again.records["0011"] == {"score": None}
    assert digest({"a": 1, "b": [2]}) == digest({"b": [2], "a": 1}) != digest({"a": 1, "b": [3]})


def test_without_a_file_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(made(None).records) == 16
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [CONTENT, None])
def test_a_file_cut_anywhere_goes_on(tmp_path, content, caplog):
    whole = made(tmp_path / "whole.jsonl", 4, content)
    data = (tmp_path / "whole.jsonl").read_bytes()
    file = tmp_path / "cut.jsonl"
    for cut in range(len(data) + 1):
        file.write_bytes(data[:cut])
        store = Store(file, "scores", content)
        assert len(store.records) == max(data[:cut].count(b"\n") - (content is not None), 0)
        for key in whole.records.keys() - store.records.keys():
            store.add(key, **whole.records[key])
        assert Store(file, "scores", content).records == whole.records
    assert not caplog.records  # half a line is what a kill leaves, and no damage


@pytest.mark.parametrize("seed", range(8))
def test_a_damaged_line_is_one_sentence_and_costs_no_other(tmp_path, seed, caplog):
    file, rng = tmp_path / "scores.jsonl", np.random.default_rng(seed)
    whole = made(file)
    lines = file.read_bytes().split(b"\n")
    number = int(rng.integers(1, 17))
    line = bytearray(lines[number])
    line[rng.integers(len(line))] ^= 1 << int(rng.integers(8))
    lines[number] = bytes(line).replace(b"\n", b" ")
    file.write_bytes(b"\n".join(lines))
    store = Store(file, "scores", CONTENT)
    lost = f"{number - 1:04b}"
    assert store.records == {key: record for key, record in whole.records.items() if key != lost}
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: line {number + 1} is damaged and does not count: what it held is made again"
    ]
    store.add(lost, **whole.records[lost])
    assert Store(file, "scores", CONTENT).records == whole.records


@pytest.mark.parametrize(("count", "which"), [(3, "lines 2, 3, 4"), (9, "9 lines")])
def test_many_damaged_lines_are_one_sentence(tmp_path, count, which, caplog):
    file = tmp_path / "scores.jsonl"
    made(file)
    first, *lines = file.read_text().split("\n")
    file.write_text("\n".join([first, *["?"] * count, *lines[count:]]))
    assert len(Store(file, "scores", CONTENT).records) == 16 - count
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: {which} are damaged and do not count: what they held is made again"
    ]


def test_other_content_is_refused_and_left_as_it_is(tmp_path):
    file = tmp_path / "scores.jsonl"
    made(file)
    before = file.read_bytes()
    for changed, said in (
        ({"sliding_window": 7}, r"\(sliding_window was 6 there and is 7 here\)"),
        ({"weights": "b" * 64}, r"\(other weights\)"),
        ({"sliding_window": 7, "new": True}, r"was 6 there and is 7 here; new was None there and is True here\)"),
    ):
        with pytest.raises(ConfigError, match=rf"scores.jsonl holds scores of other content .*{said}: name another"):
            Store(file, "scores", CONTENT | changed)
    with pytest.raises(ConfigError, match="gone was 1 there and is None here"):
        check_content(file, "scores", {"gone": 1}, {})
    damaged = ", or its first line is damaged"
    for data, said in (
        (b'{"rows": []}\n', ""),
        (b"\xff\n" + before, damaged),
        (before.replace(b'"content": {', b'"content": {"x": 1, ', 1), damaged),
    ):
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=f"scores.jsonl holds no scores{said}: name"):
            Store(file, "scores", CONTENT)
        assert file.read_bytes() == data


@pytest.mark.parametrize("content", [CONTENT, None])
@pytest.mark.parametrize(
    "data", [b"{}", b'{"format": 1}', b"a text", b"\x00", b"Monday\nTuesday", b"Monday\n\n", b"\n{"]
)
def test_a_file_of_something_else_is_not_written_over(tmp_path, content, data):
    file = tmp_path / "pattern.json"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=r"pattern.json holds no scores: name another file"):
        Store(file, "scores", content)
    assert file.read_bytes() == data


def test_a_document_is_whole_or_refused(tmp_path):
    file = tmp_path / "results.json"
    assert read_document(file, "results", "rows") == read_document(file) == {}
    file.write_text('{"rows": [1]}')
    assert read_document(file, "results", "rows") == {"rows": [1]}
    for text, said in (
        ('{"rows": 3}', "holds no results: name another"),
        ("[]", "must hold a JSON object"),
        ('{"rows": [', "is not valid JSON.*: name another file, or remove this one to start over$"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"results.json {said}"):
            read_document(file, "results", "rows", START_OVER)


def test_what_is_found_is_said_in_one_wording(tmp_path, capsys):
    tell_found(tmp_path, 0, 30, "replies")
    tell_found(tmp_path, 12, 30, "replies")
    assert capsys.readouterr().err == f"{tmp_path}: found 12 of 30 replies here, doing 18\n"
