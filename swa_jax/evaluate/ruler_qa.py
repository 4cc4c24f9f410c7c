"""RULER's questions among documents (qa_1, qa_2; arXiv:2404.06654), from the user's own SQuAD or HotpotQA file.

The documents that hold the answer stand among others: first those that RULER takes first (of SQuAD the other paragraphs
of the same article, of HotpotQA the other paragraphs that come with the question), then all the rest of the file, and
then from its beginning again. They are shuffled, and numbered.

Three differences are meant, beside the finer fit to a length. Short prompts have the documents with the answer and as
many others as there is room for; RULER has all ten of HotpotQA's, however short. Questions are drawn; RULER takes them
in the order of the file. A depth can be asked for: the place of the first document with the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import parse_json_value
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.ruler_prompts import Draft, Hay, Room, placed

TASK_TEMPLATE = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "Question: {query}"
)
ANSWER_PREFIX = " Answer:"
DOCUMENT = "Document {number}:\n{document}"


@dataclass(frozen=True)
class Asked:
    """A question of a file; documents by their numbers."""

    question: str
    answers: list[str]  # one of them is enough
    own: list[int]  # with the answer
    near: list[int]  # what comes first among the others


@dataclass(frozen=True)
class QuestionFile:
    """Questions and all documents of a file."""

    name: str
    questions: list[Asked]
    documents: list[str]

    def drawn(self, index: int, seed: int) -> Asked:
        """The `index`-th of the questions in an order that the seed draws."""
        if index >= len(self.questions):
            raise ConfigError(
                f"{self.name} has {len(self.questions)} questions with an answer: ask for no more examples than that"
            )
        return self.questions[np.random.default_rng([seed, 1]).permutation(len(self.questions))[index]]


def read_squad(file: Path) -> QuestionFile:
    """SQuAD's JSON, version 1 or 2; questions without an answer are left out.

    Raises:
      ConfigError: the file is no such JSON, or has no question with an answer.
    """
    return _read(file, "SQuAD's JSON (data, paragraphs, context, qas)", _squad)


def read_hotpotqa(file: Path) -> QuestionFile:
    """HotpotQA's JSON, its distractor setting; all its paragraphs count as own where no supporting facts are named.

    Raises:
      ConfigError: as of `read_squad`.
    """
    return _read(file, "HotpotQA's JSON (a list of question, answer, context)", _hotpotqa)


READERS: Mapping[str, Callable[[Path], QuestionFile]] = {"qa_1": read_squad, "qa_2": read_hotpotqa}


def qa_example(room: Room, rng: np.random.Generator, depth: float | None, file: QuestionFile, asked: Asked) -> Example:
    """One example; `depth`, if not None, is the place of the first document with the answer."""
    own = rng.permutation(asked.own).tolist()
    depths = sorted(rng.random(len(own)).tolist())
    if depth is not None:
        depths = [depth, *(max(depth, other) for other in depths[1:])]
    needles = [(place, file.documents[number]) for place, number in zip(depths, own, strict=True)]
    hay = Hay(_others(rng, asked, file.documents))
    seed = int(rng.integers(2**63))  # of the others' order

    def question(size: int, whole_words: bool) -> str:
        others = hay.take(size, whole_words)
        # The order of keys, and not of a permutation: one more document leaves the others where they are.
        keys = np.random.default_rng(seed).random(len(others))
        documents = placed([others[i] for i in np.argsort(keys)], needles)
        context = "\n\n".join(
            DOCUMENT.format(number=number, document=document) for number, document in enumerate(documents, start=1)
        )
        return TASK_TEMPLATE.format(context=context, query=asked.question)

    def about(size: int, whole_words: bool) -> dict[str, Any]:
        return {
            "depth": needles[0][0],
            "first": needles[0][1],
            "haystack": file.name,
            "num_documents": len(needles) + len(hay.take(size, whole_words)),
        }

    return room.fit(
        Draft(
            least="the documents with the answer and the question of qa",
            prefix=ANSWER_PREFIX,
            references=asked.answers,
            answer=f" {asked.answers[0]}",
            question=question,
            about=about,
        )
    )


def _others(rng: np.random.Generator, asked: Asked, documents: Sequence[str]) -> Iterator[str]:
    """Documents without the answer, the near ones first, without end."""
    near = rng.permutation(asked.near).astype(int).tolist()
    taken = {*asked.own, *near}
    far = [number for number in range(len(documents)) if number not in taken]
    order = near + rng.permutation(far).astype(int).tolist()
    if not order:
        raise ConfigError("the file of questions has no other documents to put beside those with the answer")
    while True:
        yield from (documents[number] for number in order)


def _read(file: Path, form: str, parse: Callable[[Any], tuple[list[Asked], list[str]]]) -> QuestionFile:
    try:
        questions, documents = parse(parse_json_value(file.read_bytes(), file))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{file} is not {form}") from None
    some = [asked for asked in questions if asked.answers and asked.own]
    if not some:
        raise ConfigError(f"{file} has no question with an answer")
    return QuestionFile(file.name, some, documents)


def _squad(data: Any) -> tuple[list[Asked], list[str]]:
    articles = [article["paragraphs"] for article in data["data"]]
    documents = _numbers(paragraph["context"] for article in articles for paragraph in article)
    questions = []
    for article in articles:
        whole = dict.fromkeys(documents[paragraph["context"]] for paragraph in article)
        for paragraph in article:
            own = documents[paragraph["context"]]
            near = [number for number in whole if number != own]
            for asked in paragraph["qas"]:
                if not asked.get("is_impossible", False):
                    answers = _distinct(answer["text"] for answer in asked["answers"])
                    questions.append(Asked(str(asked["question"]), answers, [own], near))
    return questions, list(documents)


def _hotpotqa(data: Any) -> tuple[list[Asked], list[str]]:
    contexts = [[(title, f"{title}\n{''.join(lines)}") for title, lines in one["context"]] for one in data]
    documents = _numbers(text for context in contexts for _, text in context)
    questions = []
    for one, context in zip(data, contexts, strict=True):
        facts = {title for title, _ in one.get("supporting_facts") or context}
        own, near = (
            list(dict.fromkeys(documents[text] for title, text in context if (title in facts) == wanted))
            for wanted in (True, False)
        )
        questions.append(Asked(str(one["question"]), _distinct([one["answer"]]), own, near))
    return questions, list(documents)


def _numbers(texts: Iterable[str]) -> dict[str, int]:
    return {text: number for number, text in enumerate(dict.fromkeys(texts))}


def _distinct(answers: Iterable[Any]) -> list[str]:
    return [answer for answer in dict.fromkeys(map(str, answers)) if answer.strip()]
