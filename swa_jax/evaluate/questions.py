"""Questions from the user's own copies of LongBench, LongBench v2, LongMemEval and of files like GSM8K.

Nothing is fetched. LongBench's prompts are part of its distribution (`dataset2prompt.json`) and are read from there;
the wordings of the others below are ours, unless the user names a file with another.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import parse_json_value, read_json
from swa_jax.base.settings import nearest
from swa_jax.evaluate import longbench_metrics as metrics
from swa_jax.evaluate import numbers

Score = Callable[[str, str], float]  # answer, reference


@dataclass(frozen=True)
class Question:
    """A prompt, what is right, and how an answer is scored."""

    benchmark: str
    group: str  # the data set, domain or question type that scores are averaged over
    prompt: str
    references: list[str]
    max_new_tokens: int
    score: Score | None  # None: a judge decides
    judged: dict[str, Any] | None = None  # what the judge is told, beside the answer
    first_line: bool = False  # only the answer's first line counts
    until: str | None = None  # an answer counts up to here
    chat: bool = True  # a chat model's template goes around the prompt
    also: tuple[str, ...] = ()  # sets of questions, across the groups, that are also averaged over


# LongBench: tokens of an answer, and the metric. Chinese data sets are not here.
_LONGBENCH: dict[str, tuple[int, str]] = {
    "narrativeqa": (128, "qa_f1"),
    "qasper": (128, "qa_f1"),
    "multifieldqa_en": (64, "qa_f1"),
    "hotpotqa": (32, "qa_f1"),
    "2wikimqa": (32, "qa_f1"),
    "musique": (32, "qa_f1"),
    "gov_report": (512, "rouge_l"),
    "qmsum": (512, "rouge_l"),
    "multi_news": (512, "rouge_l"),
    "trec": (64, "classification"),
    "triviaqa": (32, "qa_f1"),
    "samsum": (128, "rouge_l"),
    "passage_count": (32, "count"),
    "passage_retrieval_en": (32, "retrieval"),
    "lcc": (64, "code_similarity"),
    "repobench-p": (64, "code_similarity"),
}
_CHINESE = ("multifieldqa_zh", "dureader", "vcsum", "lsht", "passage_retrieval_zh")
_FIRST_LINE = ("trec", "triviaqa", "samsum")
_NO_CHAT = ("trec", "triviaqa", "samsum", "lcc", "repobench-p")  # few-shot prompts and code

V2_PROMPT = """\
Read the text, then answer the question about it.

{context}

Question: {question}
(A) {choice_A}
(B) {choice_B}
(C) {choice_C}
(D) {choice_D}

Exactly one choice is right. Answer with the words "The correct answer is (X)", X being its letter."""
V2_TOKENS = 128

MEMORY_PROMPT = """\
Below are earlier conversations between a user and an assistant, oldest first. Answer the question with their help.

{history}

Today is {question_date}.
Question: {question}
Answer:"""
MEMORY_TOKENS = 512
ABSTENTION = "abstention"

PROBLEM_PROMPT = """\
Solve the problem step by step. Write the result, a number, at the very end.

Problem: {question}
Solution:"""
PROBLEM_TOKENS = 512
END_OF_STEPS = "####"  # in GSM8K's answers


def longbench(path: Path, prompts: Path) -> list[Question]:
    """LongBench's records, from one `.jsonl` or a folder of them, named after their data sets (`_e` at the end or not).

    Raises:
      ConfigError: an unknown or Chinese data set, a data set without prompt, or a record without the fields needed, or
        with answers that are no texts.
    """
    templates: dict[str, str] = read_json(prompts)
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files:
        raise ConfigError(f"{path} has no .jsonl files")
    questions = []
    for file in files:
        for where, record in _records(file):
            name = str(record.get("dataset", file.stem)).removesuffix("_e")
            if name in _CHINESE:
                raise ConfigError(
                    f"{where}: '{name}' is Chinese, and its words cannot be told apart here: leave it out"
                )
            if name not in _LONGBENCH:
                raise ConfigError(f"{where}: no LongBench data set '{name}'{nearest(name, list(_LONGBENCH))}")
            if name not in templates:
                raise ConfigError(f"{prompts} has no prompt for '{name}'")
            new, metric = _LONGBENCH[name]
            score: Score = getattr(metrics, metric)
            if metric == "classification":
                score = functools.partial(metrics.classification, classes=_texts(record, "all_classes", where))
            prompt, references = _fill(templates[name], record, where), _texts(record, "answers", where)
            for reference in references:
                score("", reference)  # one that cannot be compared with is to be told now, and not after hours
            questions.append(
                Question(
                    benchmark="longbench",
                    group=name,
                    prompt=prompt,
                    references=references,
                    max_new_tokens=new,
                    score=score,
                    first_line=name in _FIRST_LINE,
                    chat=name not in _NO_CHAT,
                )
            )
    return questions


def longbench_v2(file: Path) -> list[Question]:
    """LongBench v2's multiple choices, grouped by domain, and also by difficulty and length.

    Raises `ConfigError` for a record without the fields, or whose answer is no letter from A to D.
    """
    return [
        Question(
            benchmark="longbench-v2",
            group=str(_field(record, "domain", where)),
            prompt=_fill(V2_PROMPT, record, where),
            references=[_letter(record, where)],
            max_new_tokens=V2_TOKENS,
            score=metrics.choice,
            also=tuple(str(record[name]) for name in ("difficulty", "length") if name in record),
        )
        for where, record in _records(file)
    ]


def _letter(record: dict[str, Any], where: str) -> str:
    letter = _field(record, "answer", where)
    if letter not in [*"ABCD"]:
        raise ConfigError(f"{where}: the answer must be A, B, C or D, got {letter!r:.40}")
    return str(letter)


def longmemeval(file: Path) -> list[Question]:
    """LongMemEval's questions about past conversations, grouped by type; a judge scores them.

    Questions whose id ends in `_abs` have no answer in the conversations; the judge is told. They are part of their
    groups, and also averaged over apart ("abstention"), as its paper does.
    """
    questions = []
    for where, record in _records(file):
        told = {
            "type": _field(record, "question_type", where),
            "question": _field(record, "question", where),
            "reference": str(_field(record, "answer", where)),
            "unanswerable": str(_field(record, "question_id", where)).endswith("_abs"),
        }
        sessions = _field(record, "haystack_sessions", where)
        dates = record.get("haystack_dates") or [""] * len(sessions)
        history = "\n\n".join(_session(turns, date) for turns, date in zip(sessions, dates, strict=True))
        questions.append(
            Question(
                benchmark="longmemeval",
                group=told["type"],
                prompt=_fill(MEMORY_PROMPT, record | {"history": history}, where),
                references=[told["reference"]],
                max_new_tokens=MEMORY_TOKENS,
                score=None,
                judged=told,
                also=(ABSTENTION,) if told["unanswerable"] else (),
            )
        )
    return questions


def problems(file: Path, *, judged: bool = False) -> list[Question]:
    """Problems with a number as answer, such as GSM8K's: JSON lines with `question`, `answer` and maybe `group`.

    What stands behind `####` is the answer, if that mark is there. `type` counts as `group`.

    Args:
      judged: a judge scores them, of answers of any kind; else the number that an answer ends with must be right.

    Raises:
      ConfigError: a record without the fields, or, if none judges, without a number in its answer.
    """
    questions = []
    for where, record in _records(file):
        asked = str(_field(record, "question", where))
        answer = str(_field(record, "answer", where)).rpartition(END_OF_STEPS)[2].strip()
        if not judged and numbers.last_number(answer) is None:
            raise ConfigError(
                f"{where}: the answer '{answer:.40}' has no number to compare with: name a program that judges with "
                "--judge"
            )
        questions.append(
            Question(
                benchmark="problems",
                group=str(record.get("group", record.get("type", file.stem))),
                prompt=_fill(PROBLEM_PROMPT, record, where),
                references=[answer],
                max_new_tokens=PROBLEM_TOKENS,
                until="\nProblem:",  # models that do not chat go on with another one
                score=None if judged else numbers.same_number,
                judged={"type": "problem", "question": asked, "reference": answer, "unanswerable": False},
            )
        )
    return questions


def _session(turns: Sequence[dict[str, str]], date: str) -> str:
    lines = [f"{turn['role']}: {turn['content']}" for turn in turns]
    return "\n".join([f"[{date}]", *lines] if date else lines)


def _fill(template: str, record: dict[str, Any], where: str) -> str:
    """`{name}` replaced by the record's fields; other braces, which code has, stay."""
    for name in ("context", "input", "history", "question_date", "question", *(f"choice_{x}" for x in "ABCD")):
        if f"{{{name}}}" in template:
            _field(record, name, where)
    pieces, rest = [], template
    while rest:
        before, brace, after = rest.partition("{")
        name, end, beyond = after.partition("}")
        if brace and end and name in record:
            pieces += [before, str(record[name])]
            rest = beyond
        else:
            pieces += [before, brace]
            rest = after
    return "".join(pieces)


def _field(record: dict[str, Any], name: str, where: str) -> Any:
    if name not in record:
        raise ConfigError(f"{where} has no field '{name}'")
    return record[name]


def _texts(record: dict[str, Any], name: str, where: str) -> list[str]:
    texts = _field(record, name, where)
    if not (isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)):
        raise ConfigError(f"{where}: '{name}' must be a list of texts, at least one, got {texts!r:.40}")
    return texts


def _records(file: Path) -> list[tuple[str, dict[str, Any]]]:
    """Where each record is, and the record, of a file that is one JSON list, or has one JSON object a line."""
    data = file.read_bytes()
    if data.lstrip().startswith(b"["):
        records = parse_json_value(data, file)
    else:
        lines = enumerate(data.split(b"\n"), 1)
        records = [parse_json_value(line, f"{file}, line {number}") for number, line in lines if line.strip()]
    if not records or not all(isinstance(record, dict) for record in records):
        raise ConfigError(f"{file} must hold JSON objects, one a line or in a list, and at least one")
    return [(f"{file}, record {number}", record) for number, record in enumerate(records)]
