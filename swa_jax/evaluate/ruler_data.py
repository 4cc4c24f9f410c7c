"""What RULER's prompts are made of (arXiv:2404.06654): essays, word lists, SQuAD and HotpotQA, in files of a folder.

`scripts/get_ruler.py` brings them. Files of one's own, in the same form, do as well.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import parse_json_value, read_utf8, sum_of_file

FOLDER = Path("data/ruler")
# The SHA-256 sums of RULER's own: of its code's release 26.3, of wonderwords 3.0.1.
SUMS = {
    "essays.txt": "bc136cc31236ea26a5e475e3b17d312acaf05e1ce210e173a3ef4e383b0a86cd",
    "squad.json": "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
    "hotpotqa.json": "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
    "nouns.txt": "8d88b3ebc2e2969ed92ebe49cdb0c8a87c2ad3b27493d7afdff608f2e51c5bc9",
    "adjectives.txt": "66814d46b7e292c83e839d12fe2fa083c8f66779b14b294e1be4e1342c5d4131",
    "verbs.txt": "9fbf5e4e69b8869aebd88e6d545312ff9f878a747327ede5f6dbbba5c27b08ad",
}
ESSAYS, SQUAD, HOTPOTQA, NOUNS, ADJECTIVES, VERBS = SUMS


@dataclass(frozen=True)
class Asked:
    """A question of a file; documents by their numbers."""

    question: str
    answers: list[str]  # one of them is enough
    own: list[int]  # what RULER always shows
    near: list[int]  # what comes first among the others
    gold: list[int]  # those of `own` with the answer


@dataclass(frozen=True)
class QuestionFile:
    """Questions in the file's order, and all documents, sorted."""

    questions: list[Asked]
    documents: list[str]


class RulerData:
    """The files of a folder, each read when first asked for. All raise `ConfigError` for a file of another form."""

    def __init__(self, folder: Path = FOLDER):
        self.folder = folder

    def check(self, task: str, files: Sequence[str]) -> None:
        """Raises `ConfigError` where a file that the task needs is not there."""
        for file in files:
            if not (self.folder / file).is_file():
                raise ConfigError(
                    f"RULER's task {task} needs {self.folder / file}, which is not there: run `make ruler-data` in the "
                    "repository, or name a folder that has it with --data"
                )

    def named(self, files: Sequence[str]) -> str:
        """Whether these files are RULER's own; empty where there are none."""
        others = [file for file in files if self._sum(file) != SUMS[file]]
        return f"your own {' and '.join(others)}" if others else "RULER's own" if files else ""

    def _sum(self, file: str) -> str:
        if file not in self._sums:
            self._sums[file] = sum_of_file(self.folder / file)
        return self._sums[file]

    @cached_property
    def _sums(self) -> dict[str, str]:
        return {}

    @cached_property
    def sentences(self) -> Essays:
        return Essays(read_utf8(self.folder / ESSAYS).split("\n"))

    @cached_property
    def keys(self) -> Pairs:
        return Pairs(self._words(ADJECTIVES), self._words(NOUNS))

    @cached_property
    def words(self) -> list[str]:
        """All words, sorted."""
        return sorted({word for file in (NOUNS, ADJECTIVES, VERBS) for word in self._words(file)})

    @cached_property
    def squad(self) -> QuestionFile:
        return _read(self.folder / SQUAD, "SQuAD's JSON (data, paragraphs, context, qas)", _squad)

    @cached_property
    def hotpotqa(self) -> QuestionFile:
        return _read(self.folder / HOTPOTQA, "HotpotQA's JSON (a list of question, answer, context)", _hotpotqa)

    def _words(self, file: str) -> list[str]:
        words = [line.rstrip() for line in read_utf8(self.folder / file).splitlines()]
        if not any(words):
            raise ConfigError(f"{self.folder / file} is empty: it must have a word a line")
        return words


class Essays:
    """A text in sentences: its lines, one after the other, with the blanks at their ends."""

    def __init__(self, lines: Sequence[str]):
        self.lines = [line for line in lines if line]
        # Words that have ended with the first n lines: a word ends at a blank.
        self.ends = [0, *itertools.accumulate(line.count(" ") for line in self.lines)]

    @property
    def num_words(self) -> int:
        return self.ends[-1]

    def first(self, words: int) -> list[str]:
        """The sentences of the first so many words; the last one is cut there."""
        whole = bisect_left(self.ends, words)
        found = self.lines[:whole]
        if whole < len(self.ends) and self.ends[whole] > words:
            found[-1] = " ".join(found[-1].split(" ")[: words - self.ends[whole - 1]])
        return [line.strip() for line in found]


class Pairs(Sequence[str]):
    """All `adjective-noun`, sorted and none twice, without the millions of them in memory.

    Adjectives are taken in blocks: what begins with the same adjective and hyphen is sorted among itself alone.
    """

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str]):
        self.nouns = sorted(set(nouns))
        self.blocks: list[list[str]] = []
        for head in sorted({f"{adjective}-" for adjective in adjectives}):
            if self.blocks and head.startswith(self.blocks[-1][0]):
                self.blocks[-1].append(head)
            else:
                self.blocks.append([head])
        sizes = (len(self.nouns) if len(block) == 1 else len(self._pairs(block)) for block in self.blocks)
        self.ends = [0, *itertools.accumulate(sizes)]

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, place: Any) -> Any:
        block = bisect_right(self.ends, place) - 1
        return self._pairs(self.blocks[block])[place - self.ends[block]]

    def _pairs(self, block: Sequence[str]) -> list[str]:
        return sorted({head + noun for head in block for noun in self.nouns})


def _read(file: Path, form: str, parse: Callable[[Any], tuple[list[Asked], list[str]]]) -> QuestionFile:
    try:
        questions, documents = parse(parse_json_value(file.read_bytes(), file))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(f"{file} is not {form}") from None
    some = [asked for asked in questions if asked.answers and asked.own]
    if not some:
        raise ConfigError(f"{file} has no question with an answer")
    return QuestionFile(some, documents)


def _squad(data: Any) -> tuple[list[Asked], list[str]]:
    articles = [article["paragraphs"] for article in data["data"]]
    documents = _numbers(paragraph["context"] for article in articles for paragraph in article)
    questions = []
    for article in articles:
        whole = [documents[paragraph["context"]] for paragraph in article]
        for paragraph in article:
            own = documents[paragraph["context"]]
            near = [number for number in whole if number != own]
            for asked in paragraph["qas"]:
                if not asked.get("is_impossible", False):
                    answers = [str(answer["text"]) for answer in asked["answers"]]
                    questions.append(Asked(str(asked["question"]), answers, [own], near, [own]))
    return questions, list(documents)


def _hotpotqa(data: Any) -> tuple[list[Asked], list[str]]:
    contexts = [[(title, f"{title}\n{''.join(lines)}") for title, lines in one["context"]] for one in data]
    documents = _numbers(text for context in contexts for _, text in context)
    questions = []
    for one, context in zip(data, contexts, strict=True):
        facts = {title for title, _ in one.get("supporting_facts") or context}
        own = [documents[text] for _, text in context]
        gold = [documents[text] for title, text in context if title in facts]
        questions.append(Asked(str(one["question"]), [str(one["answer"])], own, [], gold))
    return questions, list(documents)


def _numbers(texts: Iterable[str]) -> dict[str, int]:
    return {text: number for number, text in enumerate(sorted(set(texts)))}
