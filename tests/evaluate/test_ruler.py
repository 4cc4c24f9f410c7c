"""RULER's needle tasks: prompts against worked examples, lengths, depths, haystacks and scores."""

import re
from itertools import cycle, islice

import pytest
from characters import Characters

from swa_jax.base.errors import ConfigError
from swa_jax.data.tokenizer import Tokenizer, load_tokenizer
from swa_jax.evaluate.ruler import ruler_examples, ruler_grid, string_match_all
from swa_jax.evaluate.ruler_needles import NEEDLE_TASKS
from swa_jax.evaluate.ruler_words import ADJECTIVES, NOUNS

ESSAY = """Work hard.  Then rest!
Is that all? It is.

A new paragraph without an end

One more for the road, he said. """
SENTENCES = [
    "Work hard.",
    "Then rest!",
    "Is that all?",
    "It is.",
    "A new paragraph without an end",
    "One more for the road, he said.",
]
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return load_tokenizer("swa_jax/recall")


def made(task: str, **options):
    """One example of a task in characters: the example, its prompt's text and its context."""
    given = {"length": 3000, "num_examples": 1, "haystack": ESSAY, "depths": [0.5]} | options
    (example,) = ruler_examples(Characters(), task, **given)
    prompt = Characters().decode(example.prompt)
    opening, _, rest = prompt.partition("\n")
    context, _, question = rest.rpartition("\n")
    return example, opening, context, question


def check_haystack(context: str, needles: list[str], haystack: list[str], separator: str) -> list[int]:
    """Taken out the needles, the context is the haystack from its start, cut at its end. How much lies before each."""
    before = []
    for needle in needles:
        assert context.count(needle) == 1
    for needle in sorted(needles, key=context.index):
        start = context.index(needle)
        before.append(len(context[:start].split(separator)) - 1 if separator == "\n" else start)
        context = (
            context[:start].removesuffix(separator) + separator + context[start + len(needle) :].lstrip(separator)
            if start
            else context[len(needle) :].lstrip(separator)
        )
    endless = separator.join(islice(cycle(haystack), 2000))
    assert endless.startswith(context.rstrip(separator))
    return before


@pytest.mark.parametrize("task", ["niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1"])
def test_one_value_asked_for_in_the_singular(task: str) -> None:
    example, opening, context, question = made(task)
    kind = "uuid" if task == "niah_single_3" else "number"
    (key,), (value,) = example.meta["keys"], example.references
    assert opening == (
        f"A special magic {kind} is hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind} afterwards."
    )
    assert question == (
        f"What is the special magic {kind} for {key} mentioned in the provided text? "
        f"The special magic {kind} for {key} mentioned in the provided text is"
    )
    assert Characters().decode(example.answer) == f" {value}."
    adjective, noun = key.split("-")
    assert adjective in ADJECTIVES
    assert noun in NOUNS
    assert (UUID4.fullmatch(value) if kind == "uuid" else re.fullmatch(r"[1-9]\d{6}", value)) is not None
    needles = re.findall(rf"One of the special magic {kind}s for [a-z]+-[a-z]+ is: [-0-9a-f]+\.", context)
    assert len(set(needles)) == (4 if task == "niah_multikey_1" else 1)
    assert f"One of the special magic {kind}s for {key} is: {value}." in needles
    if task == "niah_single_1":
        check_haystack(context, needles, [NOISE], "\n")
        assert example.meta["haystack"] == "noise (RULER)"
    else:
        check_haystack(context, needles, SENTENCES, " ")
        assert example.meta["haystack"] == "text"


def test_multiquery_asks_for_four_keys_and_multivalue_for_four_values() -> None:
    example, opening, context, question = made("niah_multiquery")
    a, b, c, d = example.meta["keys"]
    assert opening == (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the numbers afterwards."
    )
    assert question == (
        f"What are all the special magic numbers for {a}, {b}, {c}, and {d} mentioned in the provided text? "
        f"The special magic numbers for {a}, {b}, {c}, and {d} mentioned in the provided text are"
    )
    needles = [
        f"One of the special magic numbers for {key} is: {value}."
        for key, value in zip((a, b, c, d), example.references, strict=True)
    ]
    check_haystack(context, needles, SENTENCES, " ")
    one, two, three, four = example.references
    assert Characters().decode(example.answer) == f" {one}, {two}, {three}, and {four}."

    example, _, context, question = made("niah_multivalue")
    (key,) = example.meta["keys"]
    assert question.startswith(f"What are all the special magic numbers for {key} mentioned")
    assert len(set(example.references)) == 4
    check_haystack(
        context,
        [f"One of the special magic numbers for {key} is: {value}." for value in example.references],
        SENTENCES,
        " ",
    )


@pytest.mark.parametrize(
    ("task", "key", "value"),
    [("niah_multikey_2", r"[a-z]+-[a-z]+", r"[1-9]\d{6}"), ("niah_multikey_3", UUID4.pattern, UUID4.pattern)],
)
def test_a_haystack_of_needles_has_one_line_a_needle_and_no_key_twice(task: str, key: str, value: str) -> None:
    example, _, context, _ = made(task, length=6000, depths=[0.25])
    kind = "numbers" if task == "niah_multikey_2" else "uuids"
    *lines, last = context.split("\n")
    found = [re.fullmatch(rf"One of the special magic {kind} for ({key}) is: ({value})\.", x) for x in lines]
    keys, values = [m.group(1) for m in found if m], [m.group(2) for m in found if m]
    assert len(set(keys)) == len(set(values)) == len(lines) > 30
    assert last.startswith("One of the special")  # the last line is cut where the length is reached
    place = keys.index(example.meta["keys"][0])
    assert values[place] == example.references[0]
    assert place == int(0.25 * example.meta["haystack_sentences"])
    assert example.meta["haystack_sentences"] == len(lines)  # all but the needle, and the last, which is cut


@pytest.mark.parametrize("task", NEEDLE_TASKS)
@pytest.mark.parametrize("length", [512, 4096])
def test_lengths_are_within_one_percent_below_the_target(bpe: Tokenizer, task: str, length: int) -> None:
    for haystack in (None, ESSAY):
        for example in ruler_examples(bpe, task, length=length, num_examples=2, haystack=haystack):
            assert 0.99 * length <= len(example.prompt) + 128 <= length
            assert example.meta["prompt_tokens"] == len(example.prompt)
            text = bpe.decode(example.prompt)
            key = example.meta["keys"][0]
            kind = NEEDLE_TASKS[task].values
            start = text.index(f"One of the special magic {kind} for {key} is: {example.references[0]}.")
            assert abs(start - len(bpe.decode(example.prompt[: example.meta["needle_start"]]))) <= 3


@pytest.mark.parametrize("task", ["niah_single_2", "niah_multikey_3", "niah_multiquery"])
def test_the_grid_puts_needles_where_it_says(bpe: Tokenizer, task: str) -> None:
    grid = ruler_grid(bpe, [task], lengths=[2048, 8192], depths=[0, 0.5, 1], num_examples=2)
    assert list(grid) == [(task, length, depth) for length in (2048, 8192) for depth in (0, 0.5, 1)]
    for (_, length, depth), examples in grid.items():
        for example in examples:
            assert example.meta["depth"] == depth
            place = example.meta["needle_start"] / len(example.prompt)
            assert abs(place - depth) < (0.15 if length == 2048 else 0.07)
    first = [e.references[0] for (_, length, _), cell in grid.items() for e in cell if length == 2048]
    assert len(set(first)) == len(first)


def test_drawn_depths_are_those_of_ruler_and_vary(bpe: Tokenizer) -> None:
    drawn = [e.meta["depth"] for e in ruler_examples(bpe, "niah_single_2", length=800, num_examples=40)]
    forty = {round(100 * i / 39) / 100 for i in range(40)}
    assert set(drawn) <= forty
    assert len(set(drawn)) > 15


def test_haystacks_come_from_files_and_a_chat_template_goes_around_the_question(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("First file. ")
    (tmp_path / "b.txt").write_text("Second file. ")
    example, _, context, _ = made("niah_single_2", haystack=[tmp_path / "a.txt", tmp_path / "b.txt"])
    assert context.startswith("First file. Second file. First file. ")
    assert example.meta["haystack"] == "files"
    default, *_ = made("niah_single_2", haystack=None)
    assert default.meta["haystack"] == "python standard library (held out), in place of essays"
    (chat,) = ruler_examples(
        Characters(), "niah_single_1", length=1500, num_examples=1, wrap="<user>{prompt}</user>\n<model>"
    )
    text = Characters().decode(chat.prompt)
    assert text.startswith("<user>A special magic number")
    assert "in the provided text?</user>\n<model>The special magic number for" in text
    assert 0.99 * 1500 <= len(text) + 128 <= 1500


def test_start_ids_come_first_and_count() -> None:
    class WithStart(Characters):
        start_ids = (1,)

    (example,) = ruler_examples(WithStart(), "niah_single_1", length=1500, num_examples=1, depths=[0.0])
    assert example.prompt[0] == 1
    assert example.prompt.count(1) == 1
    assert 0.99 * 1500 <= len(example.prompt) + 128 <= 1500
    start = example.meta["needle_start"]
    assert Characters().decode(example.prompt[start:]).startswith("One of the special magic numbers for")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "niah_single_4"}, "no RULER task 'niah_single_4'.*niah_single_"),
        ({"length": 300}, "length is 300 tokens, but the needles .* must be at least 476"),
        ({"depths": [1.5]}, "from 0 to 1"),
        ({"depths": []}, "from 0 to 1"),
        ({"haystack": " \n"}, "haystack is empty"),
        ({"wrap": "no place"}, "exactly once"),
    ],
)
def test_what_cannot_be_built_says_why(arguments: dict, message: str) -> None:
    given = {"task": "niah_single_2", "length": 2000, "num_examples": 1, "haystack": ESSAY} | arguments
    with pytest.raises(ConfigError, match=message):
        ruler_examples(Characters(), **given)


def test_words_run_out_with_a_sentence(monkeypatch) -> None:
    monkeypatch.setattr("swa_jax.evaluate.ruler_needles.ADJECTIVES", ("red", "blue"))
    monkeypatch.setattr("swa_jax.evaluate.ruler_needles.NOUNS", ("hat", "cat"))
    with pytest.raises(ConfigError, match=r"more than 4 keys of words.*niah_multikey_3"):
        ruler_examples(Characters(), "niah_multikey_2", length=3000, num_examples=1)


@pytest.mark.parametrize(
    ("answer", "references", "score"),
    [
        (" 1234567.", ["1234567"], 1),
        (" 123 4567.", ["1234567"], 0),
        (" 1, 22, and 333", ["22", "333", "4444", "1"], 0.75),
        ("ABCD-12", ["abcd-12"], 1),
        ("nothing", ["1", "2"], 0),
        ("91234567", ["1234567"], 1),  # as in the source: a substring, not a word
    ],
)
def test_scores_of_answers_by_hand(answer: str, references: list[str], score: float) -> None:
    assert string_match_all(answer, references) == score
    with pytest.raises(ValueError, match="references is empty"):
        string_match_all(answer, [])
