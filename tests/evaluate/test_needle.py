import hashlib
import re
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
from characters import Characters
from tokenizers import decoders, models, pre_tokenizers, processors

from swa_jax.base.errors import ConfigError
from swa_jax.data.haystack import (
    ADJECTIVES,
    NOISE,
    NOUNS,
    Haystack,
    draw_keys,
    insert_needles,
    library_files,
    split_lines,
)
from swa_jax.data.lessons import Dictionary, Needles, RepeatedTokens
from swa_jax.data.tokenizer import Tokenizer, train_byte_bpe
from swa_jax.evaluate.examples import value_places
from swa_jax.evaluate.needle import needle_examples

TEXT = "".join(f"line {i} of a text that goes on and on\n" for i in range(400))


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    words = [f" {a}-{n}\n" for a, n in zip(ADJECTIVES, NOUNS, strict=True)]
    return train_byte_bpe([TEXT, *words], 400)


@pytest.mark.parametrize("num_keys", [1, 4])
@pytest.mark.parametrize("length", [600, 1111])
def test_length_and_depth_are_exact(bpe: Tokenizer, length: int, num_keys: int) -> None:
    for tokenizer in (Characters(), bpe):
        examples = needle_examples(
            tokenizer, length=length, num_examples=6, num_keys=num_keys, depths=[0.0, 0.25, 0.6], haystack=TEXT
        )
        assert [e.meta["depth"] for e in examples] == [0.0, 0.25, 0.6] * 2
        for example in examples:
            assert len(example.prompt) + len(example.answer) == length
            start = example.meta["needle_start"]
            assert start == round(example.meta["depth"] * len(example.prompt))
            needle = f"\nOne of the special magic numbers for {example.meta['key']} is: {example.references[0]}.\n"
            assert tokenizer.decode(example.prompt[start:]).startswith(needle)


def test_question_and_answer_ask_for_the_target() -> None:
    for example in needle_examples(Characters(), length=800, num_examples=8, num_keys=4, haystack=TEXT):
        prompt, answer = Characters().decode(example.prompt), Characters().decode(example.answer)
        key, (value,) = example.meta["key"], example.references
        assert prompt.endswith(f"\nWhat is the special magic number for {key}?")
        assert answer == f" The special magic number for {key} is: {value}."
        assert prompt.count("One of the special magic numbers for") == 4
        assert prompt.count(value) == 1
        assert "".join(answer[place] for place in example.value) == value
        assert len(value) == 7
        assert value.isdigit()


def test_the_value_is_every_token_that_holds_a_part_of_it() -> None:
    """Tokenizers that write ": 4" or "3." as one token, put a blank before a digit, or count in threes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(":", "Ġ"), (":Ġ", "4"), ("3", "."), ("2", "1"), ("21", "6"), ("7", "0"), ("Ġ", "9")]
    tokens = [*alphabet, *("".join(pair) for pair in merges)]
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    for trimmed in (False, True):
        if trimmed:
            backend.post_processor = processors.ByteLevel(trim_offsets=True)
        tokenizer = Tokenizer(backend)
        for value, spelled in (("4821673", [": 4", "8", "216", "7", "3."]), ("9216708", [" 9", "216", "70", "8"])):
            text = f"Café 42 is: {value}." if value[0] == "4" else f"Café 42 is {value}."
            places = value_places(tokenizer, text, [value])
            ids = tokenizer.encode(text)
            assert [tokenizer.decode([ids[place]]) for place in places] == spelled
    assert value_places(tokenizer, "It is here.", ["4821673"]) is None
    two = value_places(tokenizer, " 11, 12", ["12", "11"])
    assert tokenizer.decode([tokenizer.encode(" 11, 12")[place] for place in two]) == "1112"


def test_a_depth_of_one_puts_the_needle_right_before_the_question() -> None:
    (example,) = needle_examples(Characters(), length=500, num_examples=1, depths=[1.0], haystack=TEXT)
    after = Characters().decode(example.prompt[example.meta["needle_start"] :])
    assert after.count("\n") == 3
    assert after.startswith("\nOne of the special")


def test_a_depth_range_is_drawn_from_and_distractors_lie_on_both_sides() -> None:
    examples = needle_examples(Characters(), length=900, num_examples=40, num_keys=3, depths=(0.4, 0.6), haystack=TEXT)
    depths = [e.meta["depth"] for e in examples]
    assert 0.4 <= min(depths) < 0.44
    assert 0.56 < max(depths) <= 0.6
    before = [Characters().decode(e.prompt[: e.meta["needle_start"]]).count("One of the special") for e in examples]
    assert set(before) == {0, 1, 2}


def test_the_same_seed_gives_the_same_examples(bpe: Tokenizer) -> None:
    def build(seed: int) -> list:
        return needle_examples(bpe, length=300, num_examples=3, num_keys=2, haystack=TEXT, seed=seed)

    assert build(5) == build(5)
    assert build(5) != build(6)
    content = repr(
        [
            (e.prompt, e.answer)
            for e in needle_examples(Characters(), length=400, num_examples=3, num_keys=2, haystack=TEXT, seed=1)
        ]
    )
    assert hashlib.sha256(content.encode()).hexdigest()[:16] == "4bab7b6adb724a78"


def test_haystacks_from_files_noise_and_the_standard_library(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("only this sentence stands here. " * 3)
    files = needle_examples(Characters(), length=700, num_examples=1, haystack=[tmp_path / "a.txt"])
    assert Characters().decode(files[0].prompt).count("only this sentence") > 10  # wraps around
    assert files[0].meta["haystack"] == "files"
    noise = needle_examples(Characters(), length=700, num_examples=1, haystack=NOISE)
    assert "The grass is green. The sky is blue." in Characters().decode(noise[0].prompt)
    library = needle_examples(Characters(), length=700, num_examples=1)
    assert library[0].meta["haystack"] == "python standard library (held out)"


def test_held_out_files_are_about_a_tenth_and_the_split_is_a_partition() -> None:
    held_out, rest = library_files(held_out=True), library_files(held_out=False)
    assert sorted(held_out + rest) == library_files()
    assert not set(held_out) & set(rest)
    assert 0.04 < len(held_out) / len(rest) < 0.2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"length": 100}, "the answer alone take .*: ask for longer prompts"),
        ({"length": 260, "num_keys": 2, "depths": [0.2]}, "do not fit around the target"),
        ({"length": 900, "num_keys": 0}, "num_keys is 0"),
        ({"length": 900, "num_keys": 1025}, "between 1 and 1024"),
        ({"length": 900, "depths": [0.2, 1.2]}, "between 0 and 1"),
        ({"length": 900, "depths": []}, "between 0 and 1"),
        ({"length": 900, "haystack": " \n"}, "haystack is empty"),
    ],
)
def test_what_cannot_be_built_says_why(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        needle_examples(Characters(), **({"num_examples": 4, "haystack": TEXT} | arguments))


def test_as_many_questions_as_keys_and_no_more() -> None:
    tokenizer = Characters()
    options = {"length": 900, "seed": 0, "num_keys": 2}
    assert Needles(tokenizer, Haystack(tokenizer, TEXT), num_questions=2, **options).num_questions == 2
    for wrong in (0, 3):
        with pytest.raises(ConfigError, match="it must be between 1 and num_keys = 2"):
            Needles(tokenizer, Haystack(tokenizer, TEXT), num_questions=wrong, **options)


def test_keys_are_distinct_and_cover_the_lists() -> None:
    keys = draw_keys(np.random.default_rng(0), 1024)
    assert len(set(keys)) == len(ADJECTIVES) * len(NOUNS) == 1024


def test_insert_needles_keeps_order_and_places() -> None:
    assert insert_needles([1, 2, 3], [[7, 8], [9]], [3, 1]) == [1, 9, 2, 3, 7, 8]
    assert insert_needles([1], [[7], [8]], [0, 0]) == [7, 8, 1]


def test_split_lines_loses_nothing() -> None:
    parts = split_lines(TEXT, 100)
    assert "".join(parts) == TEXT
    assert all(100 <= len(part) < 200 for part in parts[:-1])


# ---- the recall model's training sources ----


@pytest.fixture(scope="module")
def haystack(bpe: Tokenizer) -> Haystack:
    return Haystack(bpe, TEXT)


def test_training_needles_weight_the_answers_digits_and_not_the_needles(bpe: Tokenizer, haystack: Haystack) -> None:
    source = Needles(bpe, haystack, length=400, seed=3, num_keys=3, num_questions=2)
    sample = source[17]
    assert sample["tokens"].shape == sample["weights"].shape == (400,)
    answered = bpe.decode(sample["tokens"][sample["weights"] == 8.0])
    hidden = bpe.decode(sample["tokens"][sample["weights"] == 0.0])
    assert len(answered) == 14
    assert len(hidden) == 21
    assert {answered[:7], answered[7:]} <= {hidden[:7], hidden[7:14], hidden[14:]}
    assert bpe.decode(sample["tokens"]).endswith(f" is: {answered[7:]}.")


def test_a_dictionarys_weight_is_on_its_digits_however_many_a_token_has():
    pieces = re.compile(r"[0-9]{1,3}|[^0-9]")
    ids: dict[str, int] = {}
    in_threes = SimpleNamespace(
        encode=lambda text: [ids.setdefault(piece, len(ids)) for piece in pieces.findall(text)],
        spans=lambda text: [match.span() for match in pieces.finditer(text)],
    )
    sample = Dictionary(in_threes, length=300, seed=1)[2]
    names = {number: piece for piece, number in ids.items()}
    weighted = [names[token] for token in sample["tokens"][sample["weights"] > 0].tolist()]
    assert len(weighted) > 9
    assert all(map(str.isdigit, weighted))


def test_dictionary_digits_count_from_the_second_time_on(bpe: Tokenizer) -> None:
    sample = Dictionary(bpe, length=300, seed=1)[2]
    lines = bpe.decode(sample["tokens"]).split("\n")[1:-1]
    keys = [line.split(": ")[0] for line in lines]
    assert len(set(lines)) == len(set(keys)) < len(keys)  # each key keeps its value
    first_time = bpe.decode(sample["tokens"][: int(np.flatnonzero(sample["weights"])[0])])
    assert all(key in first_time for key in keys)


def test_repeats_repeat_and_count_only_what_can_be_known(bpe: Tokenizer, haystack: Haystack) -> None:
    for index in range(5):
        sample = RepeatedTokens(bpe.vocab_size, haystack, length=64, seed=1)[index]
        period = int((sample["weights"] == 0).sum())
        assert 4 <= period <= 32
        np.testing.assert_array_equal(sample["tokens"][period:], sample["tokens"][:-period])


def test_samples_are_a_pure_function_of_the_index(bpe: Tokenizer, haystack: Haystack) -> None:
    def sources() -> tuple:
        return (
            Needles(bpe, haystack, length=200, seed=3),
            Dictionary(bpe, length=200, seed=3),
            RepeatedTokens(bpe.vocab_size, haystack, length=200, seed=3),
        )

    for one, other in zip(sources(), sources(), strict=True):
        other[0], other[8]
        np.testing.assert_array_equal(one[9]["tokens"], other[9]["tokens"])
        assert not np.array_equal(one[9]["tokens"], one[10]["tokens"])


def test_too_short_a_training_row_is_an_error(bpe: Tokenizer, haystack: Haystack) -> None:
    with pytest.raises(ValueError, match="more than length = 64"):
        Needles(bpe, haystack, length=64, seed=0, num_keys=2, num_questions=2)[0]
