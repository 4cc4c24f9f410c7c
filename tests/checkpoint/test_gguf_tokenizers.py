"""The tokenizers of GGUF files: what they make of texts, which tokens start and end them, and what is refused."""

import json
from pathlib import Path

import gguf
import pytest
from gguf_files import write_byte_level, write_gguf, write_sentencepiece
from golden_models import GOLDEN

from swa_jax.base.errors import CheckpointError, ConfigError
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.data.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture
def folder(tmp_path):
    """`folder(write, edit)`: a checkpoint folder whose tokenizer `write` wrote."""

    def make(*writers) -> Path:
        def write(writer: gguf.GGUFWriter) -> None:
            for one in writers:
                one(writer)

        file = write_gguf(tmp_path / "m.gguf", GOLDEN / "qwen3-full", tokenizer=write)
        return import_model(file, tmp_path / f"model-{len(list(tmp_path.iterdir()))}")

    return make


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return tokenizer.backend.encode(text, add_special_tokens=False).tokens


def test_byte_level_words_and_control_tokens(folder):
    tokenizer = load_tokenizer(folder(write_byte_level))
    assert pieces(tokenizer, "abc a<|end|>é") == ["abc", "Ġa", "<|end|>", "Ã", "©"]
    assert pieces(tokenizer, "a<think>b") == ["a", "<think>", "b"]
    assert tokenizer.decode(tokenizer.encode("abc <think> é<|end|>")) == "abc <think> é"  # control tokens are left out
    assert tokenizer.eos_id == 260
    assert tokenizer.start_ids == []


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("gpt-2", "it's 2026  x", ["it", "'s", " 2026", " ", " x"]),
        ("smollm", "it's 2026  7", ["it", "'s", " ", "2", "0", "2", "6", "  ", "7"]),
        ("llama-bpe", "IT'S 2026\n\n x", ["IT", "'S", " ", "202", "6", "\n\n", " x"]),
        ("qwen2", "a12 ;\nb", ["a", "1", "2", " ;\n", "b"]),
        ("tekken", "helloWorld 12", ["hello", "World", " ", "1", "2"]),
        ("gpt-4o", "WeAREn't 1234", ["We", "AREn't", " ", "123", "4"]),
        ("tiny_aya", "1234567", ["1", "234", "567"]),
        ("afmoe", "x1234567 京都a", ["x", "1", "234", "567", " ", "京都", "a"]),
        ("seed-coder", "x12;\n", ["x", "1", "2", ";", "\n"]),
        ("deepseek-coder", " ab\n1.", [" ab", "\n", "1", "."]),
        ("laguna", "a\n\nb 1", ["a", "\n\n", "b", " ", "1"]),
    ],
)
def test_texts_are_cut_as_the_name_says(folder, pre, text, words):
    """The rules of the models' own tokenizer.json; smollm's cuts the digits first, so that two spaces before one stay
    together."""
    tokenizer = load_tokenizer(folder(lambda writer: write_byte_level(writer, pre)))
    cut = tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == words


def test_a_word_that_is_a_token_is_that_token_where_the_rule_says_so(folder):
    for pre, found in (("gpt-2", ["z", "z", "z"]), ("llama-bpe", ["zzz"])):
        tokenizer = load_tokenizer(folder(lambda writer, pre=pre: write_byte_level(writer, pre)))
        assert pieces(tokenizer, "zzz") == found


def test_sentencepiece_spaces_bytes_and_start(folder):
    tokenizer = load_tokenizer(folder(write_sentencepiece))
    assert pieces(tokenizer, "abc ab") == ["\u2581", "abc", "\u2581ab"]
    assert pieces(tokenizer, "aé") == ["\u2581a", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("abc é ab")) == "abc é ab"
    assert (tokenizer.start_ids, tokenizer.eos_id) == ([1], 2)

    def without(writer):
        writer.add_add_space_prefix(False)
        writer.add_add_bos_token(False)

    tokenizer = load_tokenizer(folder(write_sentencepiece, without))
    assert (pieces(tokenizer, "abc ab"), tokenizer.start_ids) == (["abc", "\u2581ab"], [])


def test_a_template_and_the_ends_of_a_reply(folder):
    """A turn's end that the chat template has ends a reply, whatever the file names as the end of a text."""
    made = folder(lambda writer: write_byte_level(writer, template="{{ messages }}<|end|>"))
    assert json.loads((made / "tokenizer_config.json").read_text())["chat_template"] == "{{ messages }}<|end|>"

    def other_end(writer):
        write_byte_level(writer, template="{{ messages }}<|end|>")
        writer.add_eos_token_id(0)

    made = folder(other_end)
    assert json.loads((made / "generation_config.json").read_text())["eos_token_id"] == [0, 260]
    assert load_tokenizer(made).end_ids == (0, 260)


def test_a_start_token_where_the_rule_or_the_file_says_so(folder):
    def with_start(pre, **switches):
        def write(writer):
            write_byte_level(writer, pre)
            writer.add_bos_token_id(5)
            if switches:
                writer.add_add_bos_token(switches["start"])

        return load_tokenizer(folder(write)).start_ids

    assert with_start("gpt-2") == []
    assert with_start("llama-bpe") == [5]
    assert with_start("llama-bpe", start=False) == []
    assert with_start("gpt-2", start=True) == [5]


def test_a_file_without_a_tokenizer(tmp_path):
    said: list[str] = []
    file = write_gguf(tmp_path / "m.gguf", GOLDEN / "qwen3-full")
    folder = import_model(file, tmp_path / "model", describe=said.append)
    assert not (folder / "tokenizer.json").exists()
    assert any("takes token ids only" in line for line in said)


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda w: write_byte_level(w, "smolm"), r"called 'smolm' \(tokenizer.ggml.pre\), which is not known; did you"),
        (lambda w: w.add_tokenizer_model("t5"), "a tokenizer of kind 't5' is not supported; supported: gpt2"),
        (lambda w: w.add_token_types([1, 2]), r"tokenizer.ggml.token_type must be \d+ numbers, one a token"),
        (lambda w: w.add_token_merges(["ab"]), "tokenizer.ggml.merges has 'ab', which is no pair of tokens"),
        (lambda w: w.add_token_merges(["a qq"]), "its tokenizer cannot be made: "),
        (lambda w: w.add_eos_token_id(1000), "tokenizer.ggml.eos_token_id is 1000, of 262 tokens"),
    ],
)
def test_what_is_refused(folder, write, said):
    with pytest.raises((ConfigError, CheckpointError), match=said):
        folder(write_byte_level, write)
