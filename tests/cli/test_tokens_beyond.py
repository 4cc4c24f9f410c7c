"""A tokenizer with more tokens than the model has embeddings, as Gemma 3's: only a text that holds one is refused."""

import json

import pytest
import tokenizers
import yaml
from command_line import fails, run
from tiny_models import byte_checkpoint, make

from swa_jax.base.errors import ConfigError
from swa_jax.data.tokenizer import load_tokenizer

ONLY = "the model has embeddings for ids below 257 only"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, byte_tokenizer):
    folder = tmp_path_factory.mktemp("beyond")
    backend = tokenizers.Tokenizer.from_file(str(byte_tokenizer))
    backend.add_special_tokens(["<image>"])
    (folder / "tokenizer").mkdir()
    backend.save(str(folder / "tokenizer" / "tokenizer.json"))
    return byte_checkpoint(folder, folder / "tokenizer" / "tokenizer.json", make("Fw", sliding_window=8))


def test_a_text_with_such_a_token_is_refused(checkpoint):
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.encode("a<image>")[-1] == 257
    usable = tokenizer.within(257)
    assert usable.encode("a b") == tokenizer.encode("a b")
    with pytest.raises(ConfigError, match=r"^the text has '<image>' \(id 257\) at character 30, in 'a{20}<image>b'"):
        usable.encode("a" * 30 + "<image>b")
    with pytest.raises(ConfigError, match="the tokenizer's '<eos>' has the id 256, but the model has 200 embeddings"):
        tokenizer.within(200)
    assert tokenizer.within(1000).num_ids == 258


def test_generate_and_evaluate(checkpoint, tmp_path):
    assert ONLY in fails("generate", checkpoint, "see <image>")
    (tmp_path / "text.txt").write_text("see " * 100 + "<image>")
    sentence = fails("evaluate", "text", checkpoint, tmp_path / "text.txt", "--lengths", "64")
    assert "'<image>' (id 257) at character 400" in sentence


@pytest.mark.parametrize("kind", ["txt", "jsonl", "prompts", "tokens"])
def test_training(checkpoint, tmp_path, kind):
    texts = ["all is well here. " * 20, "see <image>" + " or not" * 50]
    file = tmp_path / ("text.txt" if kind == "txt" else "text.jsonl")
    records = [{"text": text, "prompt": "what?", "answer": text} for text in texts]
    file.write_text(texts[1] if kind == "txt" else "".join(json.dumps(record) + "\n" for record in records))
    source = {"files": [str(file)], "kind": "prompts" if kind == "prompts" else "text"}
    if kind == "tokens":
        run("data", "tokenize", file, "--out", tmp_path / "tokens", "--tokenizer", checkpoint)
        source = {"files": [str(tmp_path / "tokens")], "kind": "tokens"}
    stage = {"steps": 2, "sequence_length": 16, "batch_size": 32, "data": [source]}
    config = {
        "output": str(tmp_path / "run"),
        "tokenizer": str(checkpoint),
        "init_from": str(checkpoint),
        "stages": [stage],
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    sentence = run("train", tmp_path / "config.yaml", status=2).splitlines()[-1]
    place = {
        "txt": f"{file}: the text has '<image>' (id 257) at character 4",
        "jsonl": f"{file}, line 2: the text has '<image>' (id 257) at character 4",
        "prompts": f"{file}, line 2: the text has '<image>' (id 257) at character 4",
        "tokens": f"{tmp_path}/tokens/00000.tokens, document 1, holds token 257",
    }[kind]
    assert place in sentence
    assert sentence.endswith(ONLY)
