"""Problems with a number as answer, and what judges are told of the types of questions."""

import json
import sys

import pytest
from characters import Characters

from swa_jax.base.errors import ConfigError
from swa_jax.data.chat import Wrap
from swa_jax.data.reply_text import after_thinking
from swa_jax.evaluate import question_scores
from swa_jax.evaluate.judges import RULES, command_judge, rule_of
from swa_jax.evaluate.numbers import last_number, same_number
from swa_jax.evaluate.question_scores import _by_group
from swa_jax.evaluate.questions import Question, longbench_v2, problems


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("She has 3 + 4 = 7 apples.", "7"),
        ("The total is $1,234.50.", "1234.50"),
        ("1,000,000", "1000000"),
        ("12, 34", "34"),
        ("12,34", "34"),  # no thousands
        ("It falls by -3.5 degrees", "-3.5"),
        ("a loss of -$5", "-5"),
        ("\N{MINUS SIGN}7 °C", "-7"),
        ("10-3", "3"),
        ("item-3", "3"),
        (".5 of it", "0.5"),
        ("50%", "50"),
        ("#### 42", "42"),
        ("none at all", None),
        ("", None),
    ],
)
def test_the_last_number_counts(text: str, number: str | None) -> None:
    found = last_number(text)
    assert (found is None) == (number is None)
    assert number is None or float(found) == float(number)


@pytest.mark.parametrize(
    ("answer", "reference", "score"),
    [
        ("so 42.0 apples", "42", 1),
        ("42 of 50", "42", 0),
        ("1,200", "1200", 1),
        ("nothing", "0", 0),
        ("0.30000000000000001", "0.3", 0),  # no rounding
        ("-42", "42", 0),
    ],
)
def test_the_same_number(answer: str, reference: str, score: float) -> None:
    assert same_number(answer, reference) == score


@pytest.fixture
def file(tmp_path):
    records = [
        {"question": "How many?", "answer": "3 and 4 make <<3+4=7>>7.\n#### 7", "group": "sums"},
        {"question": "What is {x} of 10?", "answer": "1,000", "type": "shares"},
        {"question": "And?", "answer": -2},
    ]
    path = tmp_path / "grade.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_problems_of_a_file(file) -> None:
    sums, shares, other = problems(file)
    assert [one.group for one in (sums, shares, other)] == ["sums", "shares", "grade"]
    assert [one.references for one in (sums, shares, other)] == [["7"], ["1,000"], ["-2"]]
    assert "Problem: What is {x} of 10?\nSolution:" in shares.prompt
    assert sums.score("It is 3 + 4 = 7.", "7") == 1
    assert sums.max_new_tokens == 512
    (judged, *_) = problems(file, judged=True)
    assert judged.score is None
    assert judged.judged == {"type": "problem", "question": "How many?", "reference": "7", "unanswerable": False}


def test_a_problem_without_a_number_needs_a_judge(file) -> None:
    file.write_text('{"question": "Who?", "answer": "Ann"}\n')
    with pytest.raises(ConfigError, match=r"grade.jsonl, record 0: the answer 'Ann' has no number .* --judge"):
        problems(file)
    assert problems(file, judged=True)[0].references == ["Ann"]
    file.write_text('{"question": "Who?"}\n')
    with pytest.raises(ConfigError, match=r"grade.jsonl, record 0 has no field 'answer'"):
        problems(file)


# ---- judges ----


def test_each_type_has_its_rule() -> None:
    plain = rule_of({"type": "multi-session"})
    assert rule_of({"type": "single-session-user"}) == rule_of({}) == plain
    assert plain.reference_is == "Expected answer"
    for kind, words, reference in (
        ("temporal-reasoning", "one more or one less", "Expected answer"),
        ("knowledge-update", "what was true before", "Expected answer"),
        ("single-session-preference", "need not do everything", "What a good answer does"),
    ):
        rule = rule_of({"type": kind, "unanswerable": False})
        assert words in rule.text
        assert words not in plain.text
        assert rule.reference_is == reference
    for kind in (*RULES, "multi-session"):  # whatever the type
        lost = rule_of({"type": kind, "unanswerable": True})
        assert lost.reference_is == "Why it cannot be answered"
        assert "cannot be answered. The answer is right if it says so" in lost.text


def test_a_program_is_told_what_a_chat_model_is_told(tmp_path) -> None:
    script, seen = tmp_path / "judge.py", tmp_path / "seen.jsonl"
    script.write_text(
        f"import sys\nlines = sys.stdin.readlines()\nopen({str(seen)!r}, 'w').writelines(lines)\n"
        "print('yes\\n' * len(lines))\n"
    )
    asked = [
        {
            "type": "temporal-reasoning",
            "question": "When?",
            "reference": "3 days",
            "unanswerable": False,
            "answer": "4",
        },
        {"type": "knowledge-update", "question": "Who?", "reference": "Nobody", "unanswerable": True, "answer": "?"},
    ]
    assert command_judge(f"{sys.executable} {script}")(asked) == [1, 1]
    told = [json.loads(line) for line in seen.read_text().splitlines()]
    for line, answer in zip(told, asked, strict=True):
        rule = rule_of(answer)
        assert line == answer | {"reference_is": rule.reference_is, "rule": rule.text}


# ---- tables by type ----


def test_sets_across_groups_have_rows_of_their_own(tmp_path) -> None:
    def question(group: str, *also: str) -> Question:
        return Question("memory", group, "?", ["x"], 4, None, also=also)

    asked = [question("a"), question("a", "abstention"), question("b", "abstention"), question("b")]
    asked.append(question("b", "abstention"))  # too long, and left out
    records = [
        {"benchmark": "memory", "group": one.group, "also": list(one.also), "cut": False, "score": score}
        for one, score in zip(asked, (1, 0, 1, 0), strict=False)
    ]
    rows = _by_group(asked, records)
    assert [(row.group, row.score, row.num_questions, row.num_left_out) for row in rows] == [
        ("a", 0.5, 2, 0),
        ("b", 0.5, 2, 1),
        ("mean", 0.5, 4, 1),
        ("abstention", 0.5, 2, 1),
        ("all", 0.5, 4, 1),
    ]
    assert all(row.interval[0] < 0.5 < row.interval[1] for row in rows)
    v2 = {"domain": "Code", "question": "?", "answer": "C", "context": "", "difficulty": "hard", "length": "long"}
    v2 |= {f"choice_{x}": x for x in "ABCD"}
    (tmp_path / "v2.json").write_text(json.dumps([v2]))
    assert longbench_v2(tmp_path / "v2.json")[0].also == ("hard", "long")


@pytest.mark.parametrize(
    ("text", "begun", "answer"),
    [
        ("  plain\n", False, "  plain\n"),
        ("<think>so 3</think>\n\n4", False, "\n\n4"),
        ("so 3</think>4", True, "4"),
        ("\n<think>3, or", False, ""),
        ("3, or", True, ""),
        ("<think>a</think>b</think>c", False, "c"),
    ],
)
def test_thinking_is_no_part_of_an_answer(text: str, begun: bool, answer: str) -> None:
    assert after_thinking(text, begun) == answer


def test_the_next_problem_is_no_part_of_an_answer(file, monkeypatch) -> None:
    """Nor what a model without a chat template writes behind it."""
    said = ["3 + 4 = 7.\n\nProblem: What is 2 + 2?\nSolution: 4", "1,000", "2"]
    monkeypatch.setattr(question_scores, "_texts", lambda *_: said)
    asked = problems(file)
    _, records = question_scores.score_questions(None, Characters(), asked, max_length=999)
    assert [(record["score"], record["answer"]) for record in records] == [(1, said[0]), (1, said[1]), (0, said[2])]


def test_a_judge_is_tried_before_the_first_answer(file, monkeypatch) -> None:
    monkeypatch.setattr(question_scores, "_texts", None)
    tried = []

    def judge(answers):
        tried.append(answers)
        raise ConfigError("out of order")

    with pytest.raises(ConfigError, match="out of order"):
        question_scores.score_questions(None, Characters(), problems(file, judged=True), max_length=999, judge=judge)
    ((told,),) = tried
    assert (told["reference"], told["answer"]) == ("7", "")


def test_a_prompt_that_ends_inside_the_thinking_is_remembered(monkeypatch) -> None:
    said = ["2 or 7</think>It is 7.", "7, or", "7"]
    monkeypatch.setattr(question_scores, "_texts", lambda *_: said)
    asked = [Question("b", "g", "?", ["7"], 4, same_number, chat=chat) for chat in (True, True, False)]
    for after, scores in (("<think>\n", [1, 0, 1]), ("<think>\n\n</think>\n", [1, 1, 1]), ("", [1, 1, 1])):
        wrap = Wrap("u:", after)
        _, records = question_scores.score_questions(None, Characters(), asked, max_length=99, wrap=wrap)
        assert [record["score"] for record in records] == scores
        assert [record["answer"] for record in records] == said
