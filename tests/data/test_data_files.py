"""Every kind of file a source can name, and what is said of those that cannot be read."""

import gzip
import json
import sys
import types

import numpy as np
import pytest

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import from_dict
from swa_jax.data.batches import check_source, make_batches
from swa_jax.data.documents import read_documents, read_prompts, read_texts
from swa_jax.data.sources import SourceConfig, source_files

TEXTS = ["The grass is green.", "The sky is blue.\nThe sun is yellow.", "Here we go: é, 你好."]


def write_jsonl(file, records):
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


def write_parquet(file, texts, field="text"):
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow comes with the data and dev extras")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"id": range(len(texts)), field: texts}), file)
    return file


def write_array_record(file, records):
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(file), "group_size:1")
    for record in records:
        writer.write(record if isinstance(record, bytes) else json.dumps(record).encode())
    writer.close()
    return file


def fake_datasets(monkeypatch, data):
    """A stand-in for Hugging Face `datasets`: `data` is what load_from_disk and load_dataset return."""

    class Dataset(list):
        column_names = ("text", "id")

        def __iter__(self):
            raise OSError("a picture that nobody asked for cannot be decoded")

        def select_columns(self, names):
            return [{name: self[i][name] for name in names} for i in range(len(self))]

    calls = []

    def load(name):
        def call(path, **options):
            calls.append((name, path, options))
            if isinstance(data, Exception):
                raise data
            return {k: Dataset(v) for k, v in data.items()} if isinstance(data, dict) else Dataset(data)

        return call

    module = types.SimpleNamespace(load_from_disk=load("disk"), load_dataset=load("dataset"))
    monkeypatch.setitem(sys.modules, "datasets", module)
    return calls


# ---- every kind gives the same documents ----


def source_of(kind, folder, monkeypatch):
    records = [{"id": i, "text": text} for i, text in enumerate([*TEXTS[:2], "", None, TEXTS[2]])]
    if kind == "txt":
        for i, text in enumerate(TEXTS):
            (folder / f"{i}.txt").write_text(text)
    elif kind == "jsonl":
        write_jsonl(folder / "a.jsonl", records[:2])
        file = write_jsonl(folder / "b.jsonl", records[2:])
        file.write_text(file.read_text() + "\n   \n")
    elif kind == "parquet":
        write_parquet(folder / "a.parquet", [record["text"] for record in records])
    elif kind == "array_record":
        write_array_record(folder / "a.array_record", records)
    elif kind == "huggingface":
        (folder / "state.json").write_text("{}")
        fake_datasets(monkeypatch, records)
        return SourceConfig("huggingface", (str(folder),))
    return SourceConfig(files=(str(folder),))


KINDS = ("txt", "jsonl", "parquet", "array_record", "huggingface")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_gives_the_same_documents(kind, tmp_path, tokenizer, monkeypatch):
    source = source_of(kind, tmp_path, monkeypatch)
    read = read_documents(source_files(source), tokenizer, source.text_field, source.split)
    assert [tokenizer.decode(document) for document in read] == TEXTS  # empty and missing texts are left out
    expected = [[*tokenizer.encode(text), tokenizer.eos_id] for text in TEXTS]
    assert [document.tolist() for document in read] == expected
    check_source(source, tokenizer)
    batch = next(make_batches([source], tokenizer, length=16, batch_size=2, seed=0))
    assert np.all(batch["segment_ids"] > 0)


def test_another_field_by_configuration(tmp_path, tokenizer):
    write_jsonl(tmp_path / "a.jsonl", [{"content": text} for text in TEXTS])
    source = from_dict(SourceConfig, {"files": [str(tmp_path)], "text_field": "content"})
    batch = next(make_batches([source], tokenizer, length=16, batch_size=1, seed=0))
    assert batch["tokens"].shape == (1, 16)


def test_huggingface_splits_and_folders(tmp_path, monkeypatch):
    (tmp_path / "dataset_dict.json").write_text("{}")
    calls = fake_datasets(monkeypatch, {"train": [{"text": "t"}], "test": [{"text": "u"}]})
    assert list(read_texts(tmp_path, "text", "test")) == ["u"]
    assert calls == [("disk", str(tmp_path), {})]
    with pytest.raises(ConfigError, match=r"has no split 'tests' \(split\); did you mean 'test'"):
        list(read_texts(tmp_path, "text", "tests"))
    (tmp_path / "dataset_dict.json").unlink()  # an ordinary folder of files
    calls = fake_datasets(monkeypatch, [{"text": "v"}])
    assert list(read_texts(tmp_path, "text", "train")) == ["v"]
    assert calls == [("dataset", str(tmp_path), {"split": "train"})]
    with pytest.raises(ConfigError, match=r"has no field 'body' \(text_field\); known: id, text"):
        list(read_texts(tmp_path, "body", "train"))


def test_what_datasets_says_is_a_sentence(tmp_path, monkeypatch):
    wrapped = RuntimeError("An error occurred while generating the dataset")
    wrapped.__cause__ = ValueError("a.jsonl: bad JSON\nin line 3")
    for error, reason in ((ValueError("Unknown split"), "Unknown split"), (wrapped, "a.jsonl: bad JSON")):
        fake_datasets(monkeypatch, error)
        with pytest.raises(ConfigError, match=f"^{tmp_path} cannot be read as a data set: {reason}$"):
            list(read_texts(tmp_path, "text", "nope"))


@pytest.mark.parametrize(
    ("module", "file", "sentence"),
    [
        ("pyarrow.parquet", "a.parquet", r"a\.parquet needs pyarrow, which is not installed: run .* '\.\[data\]' in"),
        ("datasets", "", "needs datasets, which is not installed: run pip install datasets$"),
    ],
)
def test_a_library_that_is_not_installed(module, file, sentence, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    path = tmp_path / file
    if file:
        path.write_bytes(b"")
    with pytest.raises(ConfigError, match=sentence):
        list(read_texts(path, "text"))


@pytest.mark.parametrize(
    "data", [gzip.compress(b'{"text": "a"}\n' * 50), "in UTF-16".encode("utf-16"), bytes(50)], ids=["gz", "utf-16", "0"]
)
def test_what_is_no_text_is_refused(data, tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(data)
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz is no text in UTF-8: save it as one, or name another file"):
        list(read_texts(tmp_path / "a.jsonl.gz", "text"))


# ---- prompts ----


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "array_record"])
def test_prompts_from_every_kind_of_records(kind, tmp_path, tokenizer):
    records = [{"question": "2 + 2 =", "reply": " 4"}, {"question": "hi", "reply": "ho"}]
    file = tmp_path / f"a.{kind}"
    if kind == "parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(records), file)
    else:
        (write_jsonl if kind == "jsonl" else write_array_record)(file, records)
    [one, two] = read_prompts((file,), tokenizer, "question", "reply")
    assert tokenizer.decode(one.tokens[: one.boundary]) == "2 + 2 ="
    assert tokenizer.decode(one.tokens[one.boundary :]) == " 4"
    assert one.tokens[-1] == tokenizer.eos_id
    assert two.boundary == 2
    source = SourceConfig("prompts", (str(file),), prompt_field="question", answer_field="reply")
    batch = next(make_batches([source], tokenizer, length=20, batch_size=1, seed=0))
    assert sorted(batch["full_from"][0].tolist()) == [2, 7]
    assert batch["weights"].sum() == 3 + 3  # answers with their end tokens
    assert np.count_nonzero(batch["segment_ids"]) == 10 + 5


def test_prompts_can_be_held_out(tmp_path, tokenizer):
    records = [{"prompt": f"{i} is", "answer": f" {i}"} for i in range(100)]
    source = SourceConfig("prompts", (str(write_jsonl(tmp_path / "a.jsonl", records)),), held_out=0.3, weight=2.0)
    [*held] = make_batches([source], tokenizer, length=32, batch_size=4, seed=0, held_out=True)
    assert all("full_from" in batch for batch in held)
    count = sum(int(batch["segment_ids"][row].max()) for batch in held for row in range(4))
    assert 15 < count < 45


# ---- bad input: one sentence each ----


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (
            b'{"text": "fine"}\n{"text": "cut',
            r"line 2 is not valid JSON: Unterminated string starting at \(column 10\)",
        ),
        (b'\n\n{"text": "a"} x\n', r"line 3 is not valid JSON: Extra data \(column 15\)"),
        (b'{"text": "\xff"}\n', r"line 1 is not UTF-8: invalid start byte \(byte 11\)"),
        (b'{"text": "a \\ud83d b"}', r"line 1 is not valid JSON: '\\ud83d' alone is half a character"),
        (b'"a"\n' + b"[" * 200_000, "line 1: expected an object with named fields, got str"),
        (b"[" * 200_000, "line 1 is not valid JSON for us: its lists and objects lie too deep in each other"),
        (b'{"id": ' + b"7" * 5000 + b"}", "line 1 is not valid JSON for us: a whole number in it has thousands"),
        (b'{"text": "a", "text": "b"}', "line 1 has the key 'text' twice: remove one of them"),
        (b'{"texts": "a", "id": 1}\n', r"line 1 has no field 'text' \(text_field\); did you mean 'texts'\?"),
        (b'{"body": "a", "id": 1}\n', r"line 1 has no field 'text' \(text_field\); known: body, id"),
        (b'{"text": 3}\n', "line 1: the field 'text' must be text, got int"),
        (b'["text"]\n', "line 1: expected an object with named fields, got list"),
    ],
)
def test_a_bad_line_is_named(data, sentence, tmp_path):
    (tmp_path / "bad.jsonl").write_bytes(data)
    with pytest.raises(ConfigError, match=r"bad\.jsonl, " + sentence):
        list(read_texts(tmp_path / "bad.jsonl", "text"))


def test_a_bad_record_is_named(tmp_path):
    file = write_array_record(tmp_path / "a.array_record", [{"text": "a"}, b"plain text"])
    with pytest.raises(ConfigError, match=r"a\.array_record, record 2 is not valid JSON"):
        list(read_texts(file, "text"))
    file = write_parquet(tmp_path / "a.parquet", ["x"], field="body")
    with pytest.raises(ConfigError, match=r"a\.parquet has no field 'text' \(text_field\); known: body, id"):
        list(read_texts(file, "text"))


@pytest.mark.parametrize("kind", ["parquet", "array_record"])
@pytest.mark.parametrize("damage", ["empty", "cut", "flipped"])
def test_a_damaged_file_is_named(kind, damage, tmp_path):
    file = tmp_path / f"a.{kind}"
    if kind == "parquet":
        write_parquet(file, TEXTS * 50)
    else:
        write_array_record(file, [{"text": text} for text in TEXTS * 50])
    data = bytearray(file.read_bytes())
    if damage == "flipped":
        data[-3 if kind == "parquet" else 200] ^= 0xFF  # the footer; a record
    file.write_bytes({"empty": b"", "cut": data[: len(data) // 2], "flipped": data}[damage])
    with pytest.raises(ConfigError, match=rf"a\.{kind} cannot be read as "):
        list(read_texts(file, "text"))


def test_prompts_need_records_and_both_halves(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("plain")
    with pytest.raises(ConfigError, match=r"no folder or glob with text in it \(\*\.jsonl, \*\.parquet, "):
        source_files(SourceConfig("prompts", (str(tmp_path),)))
    with pytest.raises(ConfigError, match=r"a\.txt has no records with fields"):
        read_prompts((tmp_path / "a.txt",), tokenizer, "prompt", "answer")
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", "answer": ""}])
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 1: the field 'answer' is empty"):
        read_prompts((file,), tokenizer, "prompt", "answer")
    with pytest.raises(ConfigError, match=r"line 1 has no field 'prompts' \(prompt_field\); did you mean 'prompt'"):
        read_prompts((file,), tokenizer, "prompts", "answer")


def test_missing_folders_are_named(tmp_path):
    for kind in ("tokens", "huggingface"):
        with pytest.raises(ConfigError, match=f"a source of kind '{kind}' needs its 'files' named"):
            check_source(SourceConfig(kind, ()))
        with pytest.raises(ConfigError, match=f"/nowhere': no such folder, which is what kind '{kind}' reads"):
            check_source(SourceConfig(kind, (f"{tmp_path}/nowhere",)))
    with pytest.raises(ConfigError, match=r"has no manifest\.json: it is no folder that `swa-jax data tokenize` made"):
        check_source(SourceConfig("tokens", (str(tmp_path),)))
