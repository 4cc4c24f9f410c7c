import json

import pytest
import tokenizers
from tokenizers import processors

from swa_jax.base.errors import ConfigError
from swa_jax.data.haystack import NEEDLE
from swa_jax.data.lessons import train_recall_tokenizer
from swa_jax.data.tokenizer import Tokenizer, load_tokenizer, train_byte_bpe
from swa_jax.evaluate.needle import needle_examples

TEXT = "def area(width, height):\n    return width * height  # 1024 is: 7\n"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_byte_bpe([TEXT] * 20, 280)


@pytest.mark.parametrize("text", [TEXT, "", "  \n\t x\r\n", "naïve 漢字 🙂 -a --b", "a\x00b", "x1y22"])
def test_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_digit_is_one_token_of_its_own(tokenizer: Tokenizer) -> None:
    assert [tokenizer.decode([i]) for i in tokenizer.encode("4821673")] == list("4821673")
    assert len(tokenizer.encode("1024")) == 4  # though 1024 is in the text twenty times


def test_training_is_deterministic_and_has_the_asked_size(tokenizer: Tokenizer) -> None:
    again = train_byte_bpe([TEXT] * 20, 280)
    assert again.backend.to_str() == tokenizer.backend.to_str()
    assert tokenizer.vocab_size == 280
    assert tokenizer.eos_id == 0


def test_no_special_tokens_are_added_and_none_are_decoded(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("return")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode([*ids, 0]) == "return"


def test_load_reads_a_file_or_its_folder(tokenizer: Tokenizer, tmp_path) -> None:
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(path)
        assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
        assert (loaded.vocab_size, loaded.eos_id) == (280, 0)


def test_errors_name_what_is_missing(tokenizer: Tokenizer, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"expected a tokenizer\.json"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="no token '<end>'"):
        Tokenizer(tokenizer.backend, "<end>")
    with pytest.raises(ValueError, match="257"):
        train_byte_bpe([TEXT], 200)


def test_start_ids_are_what_the_tokenizer_puts_before_a_text(tokenizer: Tokenizer, tmp_path) -> None:
    assert tokenizer.start_ids == []
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens(["<bos>"])
    bos = backend.token_to_id("<bos>")
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    backend.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.start_ids == [bos]
    assert bos not in loaded.encode(TEXT)
    example = needle_examples(loaded, length=400, num_examples=1, depths=[0.0], haystack=TEXT * 9)[0]
    assert example.prompt[0] == bos
    assert example.meta["needle_start"] == 1
    assert len(example.prompt) + len(example.answer) == 400


@pytest.mark.parametrize(
    ("template", "start"),
    [("$A <eos>", []), ("<bos> $A <eos>", ["<bos>"]), ("<eos> $A", ["<eos>"]), ("<eos> $A <eos>", ["<eos>"])],
)
def test_start_ids_are_not_what_it_puts_behind_a_text(tokenizer: Tokenizer, template, start) -> None:
    """Some tokenizers end every text by themselves, and some begin it with the token that ends the others."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.backend.to_str())
    backend.add_special_tokens(["<bos>"])
    ids = [(token, backend.token_to_id(token)) for token in ("<bos>", "<eos>")]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    assert Tokenizer(backend, "<eos>").start_ids == [backend.token_to_id(token) for token in start]


@pytest.mark.slow
def test_the_recall_tokenizer_makes_a_needle_few_tokens() -> None:
    tokenizer = train_recall_tokenizer()
    assert tokenizer.vocab_size == 1024
    needle = NEEDLE.format(key="brave-otter", value="4821673")
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode(needle)]
    assert pieces[8:12] == [" brave", "-otter", " is", ": "]
    assert pieces[12:19] == list("4821673")
    assert tokenizer.decode(tokenizer.encode(needle)) == needle


def test_vocab_size_has_room_for_the_largest_id(tmp_path, byte_tokenizer):
    stored = json.loads(byte_tokenizer.read_text())
    ids = stored["model"]["vocab"]
    last = max(ids, key=ids.get)
    ids[last] = 5000
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    assert load_tokenizer(tmp_path).vocab_size == 5001
