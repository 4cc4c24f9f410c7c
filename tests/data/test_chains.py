"""Chains as training data: what a row holds is read back from its text."""

import collections
import dataclasses
import inspect

import numpy as np
import pytest
from compiled_chains import small_tokenizer

from swa_jax.base.errors import ConfigError
from swa_jax.data.batches import make_batches, open_source
from swa_jax.data.chains import Chains, Passages
from swa_jax.data.haystack import Haystack
from swa_jax.data.lessons import Needles
from swa_jax.data.sources import SourceConfig
from swa_jax.data.tokenizer import train_byte_bpe

LENGTH = 160


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


def words_of(tokenizer, tokens) -> list[str]:
    return [tokenizer.decode([token]).strip() for token in tokens.tolist()]


def read(words: list[str]) -> tuple[dict[str, str], list[list[str]], list[int]]:
    """What each name is given before the first question, the questions with their answers, and where these end."""
    given, questions, ends = {}, [], []
    first = words.index("?")
    for i in range(first):
        if words[i] == "=":
            assert words[i + 1] not in given, "a name has one statement"
            assert words[i + 2].isdigit() or words[i + 2] in given, "a statement stands behind what it refers to"
            given[words[i + 1]] = words[i + 2]
    rest = " ".join(words[first:]).split("? ")[1:]
    for question in rest:
        questions.append(question.split())
        ends.append((ends[-1] if ends else first - 1) + 1 + len(question.split()))
    return given, questions, ends


def number(given: dict[str, str], name: str) -> tuple[int, int]:
    """A name's number, and the hops that lead to it."""
    hops = 0
    while not name.isdigit():
        name, hops = given[name], hops + 1
    return int(name), hops


@pytest.mark.parametrize(("hops", "num_chains"), [(1, 4), (2, 4), (3, 9)])
def test_every_answer_follows_from_the_statements(tokenizer, hops, num_chains):
    source = Chains(tokenizer, length=LENGTH, seed=1, num_chains=num_chains, hops=hops)
    seen = collections.Counter()
    for i in range(20):
        item = source[i]
        assert item["tokens"].shape == item["weights"].shape == (LENGTH,)
        given, questions, ends = read(words_of(tokenizer, item["tokens"]))
        assert len(given) == hops * num_chains
        assert len({value for value in given.values() if value.isdigit()}) == num_chains
        for name, states, again, answer in questions:
            value, length = number(given, name)
            assert (states, again, int(answer)) == ("=", name, value)
            seen[length] += 1
        assert np.flatnonzero(item["weights"] == 4).tolist() == ends  # the answers' numbers, and nothing else
        learned = [i for end in ends for i in (end - 2, end - 1, end)]  # of an answer; never its question
        assert np.flatnonzero(item["weights"]).tolist() == learned
    assert sorted(seen) == list(range(1, hops + 1))


def test_names_are_asked_for_with_replacement(tokenizer):
    source = Chains(tokenizer, length=LENGTH, seed=1, num_chains=4)
    asked = [[q[0] for q in read(words_of(tokenizer, source[i]["tokens"]))[1]] for i in range(20)]
    assert any(len(set(names)) < len(names) for names in asked)
    assert any(len(set(names)) < 4 <= len(names) for names in asked), "nothing is told by elimination"


def test_sums_are_of_two_numbers(tokenizer):
    source = Chains(tokenizer, length=LENGTH, seed=1, num_chains=6, hops=2, sums=0.5)
    kinds = collections.Counter()
    for i in range(20):
        given, questions, _ = read(words_of(tokenizer, source[i]["tokens"]))
        for words in questions:
            names = words[: words.index("=")]
            asked = [name for name in names if name != "+"]
            assert words[len(names) + 1 : -1] == names
            assert int(words[-1]) == sum(number(given, name)[0] for name in asked)
            kinds[len(asked)] += 1
    assert kinds[1] > 20
    assert kinds[2] > 20


def test_samples_are_a_function_of_seed_and_index(tokenizer):
    def rows(seed, **options):
        source = Chains(tokenizer, length=LENGTH, seed=seed, hops=2, **options)
        return [source[i]["tokens"].tolist() for i in (0, 1, 7)]

    assert rows(0) == rows(0)
    assert len({tuple(row) for row in rows(0) + rows(1)}) == 6


def test_text_takes_the_place_of_filler_words(tokenizer):
    hay = Haystack(tokenizer, "x")
    row = Chains(tokenizer, hay, length=LENGTH, seed=0)[0]["tokens"]
    words = words_of(tokenizer, row[: words_of(tokenizer, row).index("?")])
    assert words.count("x") == len(words) - 3 * 4


def test_a_passage_comes_again_and_again(tokenizer):
    for i in range(10):
        item = Passages(tokenizer, length=64, seed=0)[i]
        period = int(np.flatnonzero(item["weights"])[0])
        assert 4 <= period <= 32
        assert (item["tokens"][period:] == item["tokens"][:-period]).all()
        assert (item["weights"][period:] == 1).all()


@pytest.mark.parametrize(("kind", "lesson"), [("chains", Chains), ("needles", Needles)])
def test_a_source_gives_its_lesson_every_option(kind, lesson, tokenizer, monkeypatch):
    options = set(inspect.signature(lesson).parameters) & {f.name for f in dataclasses.fields(SourceConfig)}
    values = {name: 0.5 if name == "sums" else 2 + i for i, name in enumerate(sorted(options))}
    given = {}
    monkeypatch.setattr(f"swa_jax.data.batches.{lesson.__name__}", lambda *_, **named: given.update(named))
    open_source(SourceConfig(kind, **values), tokenizer, length=64, seed=7)
    assert given == values | {"length": 64, "seed": 7}
    assert len(options) >= 2


def test_mixtures_name_chains(tokenizer):
    sources = [
        SourceConfig("passages", weight=0.5),
        SourceConfig("chains", weight=0.5, hops=2, num_chains=4, num_questions=8),
    ]
    batches = make_batches(sources, tokenizer, length=64, batch_size=4, seed=0)
    batch = next(batches)
    state = batches.get_state()
    after = next(batches)
    batches.set_state(state)
    np.testing.assert_array_equal(next(batches)["tokens"], after["tokens"])
    assert (batch["weights"] == 4).any(axis=1).sum() == 2
    del state["data"]["data.1.hops"]
    with pytest.raises(ConfigError, match=r"'data\.1\.hops' was None and is now 2"):
        batches.set_state(state)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"num_chains": 33, "hops": 2}, "33 chains of 2 hops"),
        ({"num_chains": 9, "hops": 3, "length": 80}, "take 86 tokens, more than length = 80"),
        ({"num_chains": 1, "sums": 0.5}, "two chains"),
        ({"sums": 1.5}, "from 0 to 1, got 1.5"),
    ],
)
def test_what_cannot_be_drawn_is_said(tokenizer, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        Chains(tokenizer, **{"length": 400, "seed": 0} | options)[0]


def test_another_tokenizer_is_refused():
    with pytest.raises(ConfigError, match=r"the word 'amber' with 6 tokens.*swa_jax\.data\.chains"):
        Chains(train_byte_bpe(["a text"], 257), length=LENGTH, seed=0)
