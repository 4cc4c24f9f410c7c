"""RULER's tasks: prompts as its own generator makes them, where it makes none, depths, data and scores."""

import hashlib
import json
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from characters import Characters
from ruler_files import write_ruler_data

from swa_jax.base.errors import ConfigError
from swa_jax.data.chat import Wrap
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.evaluate.ruler import RULER_TASKS, ruler_examples, ruler_grid, string_match_all, string_match_part
from swa_jax.evaluate.ruler_counts import common_filler
from swa_jax.evaluate.ruler_data import SUMS, Essays, Pairs, RulerData
from swa_jax.evaluate.ruler_needles import needle_filler
from swa_jax.evaluate.ruler_prompts import Draft, Filler, Room
from swa_jax.evaluate.ruler_qa import qa_filler
from swa_jax.evaluate.ruler_scores import RulerScore, against, average

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/ruler.json").read_text())
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
QA = ("qa_1", "qa_2")


class Recall:
    """The tokenizer of the bundled model, which also knows the text of what it has encoded."""

    def __init__(self):
        self.plain, self.texts = load_tokenizer("swa_jax/recall"), {}
        self.spans = self.plain.spans

    def encode(self, text: str) -> list[int]:
        ids = self.plain.encode(text)
        self.texts[tuple(ids)] = text
        return ids

    def decode(self, ids: list[int]) -> str:
        return self.texts[tuple(ids)]


@pytest.fixture(scope="module")
def recall() -> Recall:
    return Recall()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> RulerData:
    return RulerData(write_ruler_data(tmp_path_factory.mktemp("ruler")))


def made(task: str, data: RulerData, length: int = 4000, **options):
    """One example of a task in characters, and the text of its prompt."""
    (example,) = ruler_examples(Characters(), task, length=length, num_examples=1, data=data, **options)
    return example, Characters().decode(example.prompt)


# ---- as RULER's own generator ----


@pytest.mark.parametrize("length", [int(length) for length in GOLDEN["prompts"]])
@pytest.mark.parametrize("task", RULER_TASKS)
def test_prompts_are_those_of_rulers_own_generator(recall, data, task: str, length: int) -> None:
    golden = GOLDEN["prompts"][str(length)][task]
    made = ruler_examples(recall, task, length=length, num_examples=len(golden), data=data, seed=GOLDEN["seed"])
    for example, (characters, text_sum, outputs) in zip(made, golden, strict=True):
        text = recall.decode(example.prompt)
        assert len(text) == characters
        assert hashlib.sha256(text.encode()).hexdigest() == text_sum
        assert example.references == outputs
        assert example.meta["max_new_tokens"] == RULER_TASKS[task].new_tokens


def test_answers_have_the_room_that_ruler_gives_them() -> None:
    new = {task: kind.new_tokens for task, kind in RULER_TASKS.items() if not task.startswith("niah")}
    assert new == {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
    assert len(RULER_TASKS) == 13


# ---- where RULER's own generator does not end ----


@pytest.mark.parametrize("task", RULER_TASKS)
def test_a_length_below_the_first_step_has_as_much_filler_as_fits(recall, data, task: str) -> None:
    with pytest.raises(ConfigError, match=rf"shortest prompt of {task} takes .* at least \d+$") as error:
        ruler_examples(recall, task, length=200, num_examples=1, data=data)
    # Two prompts more than the one that was measured, and what another draw may add to it.
    length = int(re.search(r"\d+$", str(error.value))[0]) + 200
    room = length - (0 if task == "fwe" else RULER_TASKS[task].new_tokens)
    for example in ruler_examples(recall, task, length=length, num_examples=3, data=data):
        assert 0.5 * room < len(example.prompt) <= room + (20 if task == "vt" else 0)
        text = recall.decode(example.prompt)
        if task not in QA:
            assert all(reference in text for reference in example.references)
        if task == "qa_2":
            (q,) = re.search(r"Question: Which of (\d+)\? Answer:$", text).groups()
            assert all(f"\nTitle {q}{p}\n" in text for p in (1, 3))


def test_what_ends_before_the_length_is_refused(data) -> None:
    room = Room(Characters(), 100, 20, Wrap())

    def make(size: int, _: int) -> Draft:
        return Draft("x" * size, "", [], "", counted="yy")

    def lengths(most: int) -> list[int]:
        return [len(draft.question) for draft in islice(Filler("t", make, 10, most=most).drafts(room), 2)]

    assert lengths(80) == [70, 70]  # 80 fit, but not with the answer
    with pytest.raises(ConfigError, match="length is 100 tokens, but the data of t ends before that"):
        lengths(79)
    assert {data.sentences.num_words, len(data.words), len(data.squad.documents)} == {
        filler.most
        for filler in (
            needle_filler("niah_single_2", data, 900, None, 0),
            common_filler(room, data, 0),
            qa_filler("qa_1", data.squad, None, 0),
        )
    }
    with pytest.raises(ConfigError, match="the file of qa_2 has 12 questions with an answer: ask for no more"):
        ruler_examples(Characters(), "qa_2", length=9000, num_examples=13, data=data)


def test_a_length_that_is_met_to_the_token_is_tried_with_one_step_more() -> None:
    """As in RULER; the draws depend on it."""
    sizes = []

    def make(size: int, _: int) -> Draft:
        sizes.append(size)
        return Draft("x" * size, "", [], "")

    assert len(next(Filler("t", make, 10).drafts(Room(Characters(), 60, 20, Wrap()))).question) == 40
    assert sizes == [10, 20, 30, 40, 50, 40]


# ---- what is added: depths, templates, start tokens ----


def test_a_needle_lies_where_it_is_wanted(data) -> None:
    for depth in (0, 0.5, 1):
        example, text = made("niah_multikey_3", data, 6000, depth=depth)
        lines = text.split("\n")[1:-1]
        (place,) = (i for i, line in enumerate(lines) if example.references[0] in line)
        assert place == int(depth * (len(lines) - 1))
        example, text = made("niah_multiquery", data, 6000, depth=depth)
        place = text.index(f"is: {example.references[0]}.") / len(text)
        assert abs(place - depth) < 0.2
    example, text = made("niah_single_1", data, 4000, depth=1)
    assert text.split("\n")[-2] == f"One of the special magic numbers for {query(text)} is: {example.references[0]}."


def query(text: str) -> str:
    return re.search(r"number for (\S+) mentioned in the provided text\?", text)[1]


def test_the_document_with_the_answer_lies_where_it_is_wanted(data) -> None:
    for task, own in (("qa_1", data.squad.documents[data.squad.questions[0].own[0]]), ("qa_2", "Title 01\n")):
        for depth in (0, 0.5, 1):
            _, text = made(task, data, 9000, depth=depth)
            found = re.split(r"Document \d+:\n", text)[1:]
            (place,) = (i for i, document in enumerate(found) if document.startswith(own))
            assert place == int(depth * (len(found) - 1))


def test_a_depth_that_a_task_has_not_is_refused(data) -> None:
    for task in ("vt", "cwe", "fwe"):
        with pytest.raises(ConfigError, match=f"RULER's task {task} has no depth, because what it asks for is all"):
            made(task, data, depth=0.5)
    with pytest.raises(ConfigError, match=r"a depth must be a fraction of the prompt from 0 to 1, got 1\.5"):
        made("niah_single_1", data, depth=1.5)


def test_a_grid_has_a_cell_for_each_depth(data) -> None:
    grid = ruler_grid(Characters(), ["niah_single_1"], lengths=[2000, 3000], depths=[0, 1], num_examples=2, data=data)
    assert list(grid) == [("niah_single_1", length, depth) for length in (2000, 3000) for depth in (0, 1)]
    asked = [example.references[0] for (_, length, _), cell in grid.items() for example in cell if length == 2000]
    assert len(set(asked)) == 4


@pytest.mark.parametrize("task", ["vt", "cwe", "fwe", "qa_1", "niah_multikey_1"])
def test_the_first_examples_do_not_depend_on_how_many_there_are(recall, data, task: str) -> None:
    def build(**options):
        return ruler_examples(recall, task, **{"length": 3000, "num_examples": 2, "seed": 5, "data": data} | options)

    assert build() == build()
    assert build(num_examples=1) == build()[:1]
    assert build(seed=6) != build()
    assert build()[0].prompt != build()[1].prompt


def test_a_chat_template_goes_around_the_question_and_counts(data) -> None:
    example, text = made("niah_single_1", data, 1500, wrap="<user>{prompt}</user>\n<model>")
    assert text.startswith("<user>A special magic number")
    assert "in the provided text?</user>\n<model>The special magic number for" in text
    assert len(text) + 128 <= 1500
    assert len(text) + 128 + len(NOISE) + 1 > 1500
    assert Characters().decode(example.answer) == f" {example.references[0]}."
    _, text = made("vt", data, 4000, wrap="<user>{prompt}</user>\n")
    assert re.fullmatch(
        r"<user> Memorize .*in the text above\.</user>\nAnswer: According to [^\n]*are: ", text, re.DOTALL
    )


def test_start_ids_come_first_and_count(data) -> None:
    class WithStart(Characters):
        start_ids = (1,)

    for length in range(1500, 1600, 5):
        (example,) = ruler_examples(WithStart(), "niah_multikey_3", length=length, num_examples=1, data=data)
        assert example.prompt[0] == 1
        assert example.prompt.count(1) == 1
        assert len(example.prompt) + 128 <= length


# ---- data ----


def test_the_first_words_of_essays_in_sentences() -> None:
    essays = Essays(["One two. ", "Three!", '"Four five." ', "Six", ""])
    assert essays.first(1) == ["One"]
    assert essays.first(2) == ["One two."]
    assert essays.first(3) == ["One two.", "Three!", '"Four']
    assert essays.first(4) == ["One two.", "Three!", '"Four five."']
    assert essays.first(9) == ["One two.", "Three!", '"Four five."', "Six"]
    assert essays.num_words == 4  # that end with a blank


def test_pairs_are_those_of_a_sorted_set() -> None:
    adjectives, nouns = ["blue", "blue-eyed", "Blue", "red", "blue", "blu", "ad hoc"], ["eyed-cat", "cat", "Cat", "cat"]
    pairs = Pairs(adjectives, nouns)
    assert list(pairs) == sorted({f"{adjective}-{noun}" for adjective in adjectives for noun in nouns})
    assert "blue-eyed-cat" in pairs


def test_data_says_what_it_is_and_what_is_missing(data, tmp_path, monkeypatch) -> None:
    example, _ = made("niah_single_2", data)
    assert example.meta["data"] == "your own essays.txt and adjectives.txt and nouns.txt"
    assert made("niah_multikey_3", data)[0].meta["data"] == ""
    monkeypatch.setitem(SUMS, "squad.json", hashlib.sha256((data.folder / "squad.json").read_bytes()).hexdigest())
    assert made("qa_1", data, 9000)[0].meta["data"] == "RULER's own"
    with pytest.raises(ConfigError, match=r"task cwe needs .*nouns\.txt, which is not there: run `make ruler-data`"):
        made("cwe", RulerData(tmp_path))
    for name in SUMS:
        (tmp_path / name).write_text("\n" if name.endswith("txt") else "[]")
    for task, sentence in (
        ("cwe", r"nouns\.txt is empty: it must have a word a line"),
        ("qa_1", r"squad\.json is not SQuAD's JSON"),
        ("qa_2", r"hotpotqa\.json has no question with an answer"),
        ("niah_single_1", r"adjectives\.txt is empty"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            made(task, RulerData(tmp_path))
    with pytest.raises(ConfigError, match=r"no RULER task 'niah_single_4'.*niah_single_"):
        made("niah_single_4", data)


# ---- scores ----


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
    assert string_match_part(answer, references) == (score > 0)
    with pytest.raises(ValueError, match="references is empty"):
        string_match_all(answer, [])


def test_one_answer_of_several_is_enough_for_a_question() -> None:
    scores = {task: kind.score for task, kind in RULER_TASKS.items()}
    assert {task for task, score in scores.items() if score is string_match_part} == set(QA)


def score(task: str, scores: list[float]) -> RulerScore:
    mean = sum(scores) / len(scores)
    return RulerScore(task, 512, None, mean, [0, 1], len(scores), [480, 500], "" if task == "vt" else "d", scores)


def test_patterns_are_compared_prompt_by_prompt_and_tasks_averaged() -> None:
    first = [score("vt", [1, 0.5, 1, 0.5]), score("cwe", [1, 1])]
    other = [score("vt", [0.5, 0, 0.5, 0]), score("cwe", [1, 0])]
    differing = against(other, first)
    assert [one.difference for one in differing] == [-0.5, -0.5]
    intervals = np.array([one.difference_interval for one in differing])  # one of them the same at every prompt
    assert (intervals[:, 0] < -0.5).all()
    assert (intervals[:, 1] > -0.5).all()
    mean = average(other, first)
    assert (mean.task, mean.length, mean.score, mean.num_examples) == ("average", 512, 0.375, 6)
    assert (mean.scores, mean.prompt_tokens, mean.data) == ([0.25, 0.5], [480, 500], "d")
    assert mean.difference == -0.5
    below, above = np.hypot(*(intervals + 0.5)) / 2  # square and add, of two: half the root of the squares
    assert mean.difference_interval == pytest.approx([-0.5 - below, -0.5 + above])
    assert average(first, None).difference is None
