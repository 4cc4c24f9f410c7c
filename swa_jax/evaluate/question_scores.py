"""A model on `Question`s: its answers, their scores by group, and a judge where there is no metric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import mean_of_groups
from swa_jax.data.chat import Wrap
from swa_jax.data.reply_text import BEGIN_OF_THINKING, END_OF_THINKING, after_thinking
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.generated_answers import generate_answers
from swa_jax.evaluate.judges import Judge
from swa_jax.evaluate.questions import Question
from swa_jax.evaluate.samples import NO_SAMPLES, Samples
from swa_jax.model.decoder import Decoder


@dataclass(frozen=True)
class GroupScore:
    """The mean score of a group's questions, from 0 to 1."""

    benchmark: str
    # "mean": over the groups, each counting the same, as LongBench averages; "all": over all questions; or one of the
    # sets of `Question.also`, whose questions count in their groups as well.
    group: str
    score: float | None  # None: none of its questions was asked
    interval: list[float] | None  # 95 %, see `estimates.mean_of_groups`; None for one question with a score between
    num_questions: int
    num_left_out: int  # longer than max_length, and not scored
    num_cut: int  # cut in the middle to fit


def score_questions(
    model: Decoder,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    *,
    max_length: int,
    cut_middle: bool = False,
    wrap: str | Wrap = "{prompt}",
    judge: Judge | None = None,
    keep: Callable[[list[dict[str, Any]]], None] = lambda _: None,
    batch_size: int = 8,
    samples: Samples = NO_SAMPLES,
    advance: Callable[[int], None] = lambda _: None,
) -> tuple[list[GroupScore], list[dict[str, Any]]]:
    """Greedy answers, scored: by group and over all, and a record for each question asked.

    A prompt that does not fit `max_length` with its answer is left out, or, as LongBench does, loses its middle:
    both are counted in the scores, and neither happens unsaid. `keep` gets the records before the judge is asked,
    whose scores are then None, so that a judge that fails does not cost the answers. Answers that `samples` knows are
    not generated again, and the others are kept there. `advance` is called with how many more questions are answered or
    left out. What a model thinks first (`<think>` to `</think>`) is in the records, and does not count. The judge is
    tried with an empty answer before the first one is generated.

    Raises:
      ConfigError: a judge is needed and not given, or no question fits.
    """
    if judge is None and any(question.score is None for question in questions):
        raise ConfigError("these questions have no metric of their own: name a judge's command with --judge")
    wrap = Wrap.of(wrap)
    asked: list[tuple[Question, list[int], bool]] = []
    for question in questions:
        tokens, cut = _prompt_tokens(tokenizer, question, max_length, cut_middle, wrap)
        if tokens:
            asked.append((question, tokens, cut))
    if not asked:
        raise ConfigError(
            f"none of the {len(questions)} prompts fits max_length = {max_length}: raise it, or cut them in the middle"
        )
    advance(len(questions) - len(asked))
    if judge is not None and (first := next((one for one, *_ in asked if one.score is None), None)):
        judge([{**(first.judged or {}), "answer": ""}])  # one that fails is to do so now, and not after hours
    texts = _texts(model, tokenizer, asked, batch_size, samples, advance)
    begun = wrap.after.rfind(BEGIN_OF_THINKING) > wrap.after.rfind(END_OF_THINKING)
    finals = [_final(question, text, begun) for (question, *_), text in zip(asked, texts, strict=True)]
    records = [_record(*one, text, final) for one, text, final in zip(asked, texts, finals, strict=True)]
    keep(records)
    judged = [i for i, record in enumerate(records) if record["score"] is None]
    if judged and judge is not None:
        told = [{**(asked[i][0].judged or {}), "answer": finals[i]} for i in judged]
        for i, verdict in zip(judged, judge(told), strict=True):
            records[i]["score"] = verdict
    return _by_group(questions, records), records


def _final(question: Question, text: str, begun: bool) -> str:
    """What counts of an answer: not what the model thinks first, nor the next question that it may go on with."""
    said = after_thinking(text, begun and question.chat)
    return said if question.until is None else said.partition(question.until)[0]


def _texts(
    model: Decoder,
    tokenizer: Tokenizer,
    asked: Sequence[tuple[Question, list[int], bool]],
    batch_size: int,
    samples: Samples,
    advance: Callable[[int], None],
) -> list[str]:
    """The answers, generated in batches of prompts that are about as long."""
    texts: list[str] = [""] * len(asked)
    for new in sorted({question.max_new_tokens for question, _, _ in asked}):
        some = [i for i, (question, _, _) in enumerate(asked) if question.max_new_tokens == new]
        some.sort(key=lambda i: len(asked[i][1]))
        for start in range(0, len(some), batch_size):
            batch = some[start : start + batch_size]
            examples = [Example(asked[i][1], [], asked[i][0].references) for i in batch]
            answers = generate_answers(
                model,
                tokenizer,
                examples,
                max_new_tokens=new,
                batch_size=batch_size,
                timed=False,
                stop_tokens=tokenizer.end_ids,
                samples=samples,
                advance=advance,
            )
            for i, text in zip(batch, answers.texts, strict=True):
                texts[i] = text
    return texts


def _prompt_tokens(
    tokenizer: Tokenizer, question: Question, max_length: int, cut_middle: bool, wrap: Wrap
) -> tuple[list[int], bool]:
    """The prompt's tokens, and whether they were cut; none if they do not fit."""
    wrap = wrap if question.chat else Wrap()
    opening = wrap.opening(tokenizer)
    start = opening + tokenizer.encode(wrap.before)
    body, end = tokenizer.encode(wrap.inside(question.prompt)), tokenizer.encode(wrap.after)
    room = max_length - question.max_new_tokens - len(start) - len(end)
    if len(body) <= room:
        return opening + tokenizer.encode(wrap.around(question.prompt)), False
    if not cut_middle or room < 2:
        return [], False
    head = room // 2
    return [*start, *body[:head], *body[len(body) - (room - head) :], *end], True


def _record(question: Question, tokens: Sequence[int], cut: bool, text: str, final: str) -> dict[str, Any]:
    """What is kept of an answer `text`, of which `final` is scored."""
    return {
        "benchmark": question.benchmark,
        "group": question.group,
        "also": list(question.also),
        "prompt_tokens": len(tokens),
        "cut": cut,
        "answer": text,
        "references": question.references,
        "score": _metric(question, final),
    }


def _metric(question: Question, text: str) -> float | None:
    """The best score over the references; None where a judge decides."""
    if question.score is None:
        return None
    answer = text.lstrip("\n").split("\n")[0] if question.first_line else text
    return float(max(question.score(answer, reference) for reference in question.references))


def _by_group(questions: Sequence[Question], records: Sequence[dict[str, Any]]) -> list[GroupScore]:
    rows = []
    for benchmark in dict.fromkeys(question.benchmark for question in questions):
        of_it = [question.group for question in questions if question.benchmark == benchmark]
        asked = [record for record in records if record["benchmark"] == benchmark]
        by_group = {group: [r for r in asked if r["group"] == group] for group in dict.fromkeys(of_it)}
        for group, mine in by_group.items():
            rows.append(_row(benchmark, group, [mine], of_it.count(group)))
        if len(by_group) > 1:
            rows.append(_row(benchmark, "mean", list(by_group.values()), len(of_it)))
        marks = [mark for question in questions if question.benchmark == benchmark for mark in question.also]
        for mark in dict.fromkeys(marks):
            rows.append(_row(benchmark, mark, [[r for r in asked if mark in r["also"]]], marks.count(mark)))
        rows.append(_row(benchmark, "all", [asked], len(of_it)))
    return rows


def _row(benchmark: str, name: str, groups: Sequence[Sequence[dict[str, Any]]], total: int) -> GroupScore:
    asked = list(chain(*groups))
    scores = [[record["score"] for record in group] for group in groups if group]
    estimate = mean_of_groups(scores) if scores else None
    return GroupScore(
        benchmark=benchmark,
        group=name,
        score=None if estimate is None else estimate.mean,
        interval=None if estimate is None else estimate.interval,
        num_questions=len(asked),
        num_left_out=total - len(asked),
        num_cut=sum(r["cut"] for r in asked),
    )
