"""The scores of LongBench (arXiv:2308.14508) and LongBench v2 (arXiv:2412.15204): of an answer against one reference.

All lie between 0 and 1. Where LongBench leans on packages, the same figures are computed here: ROUGE-L as `rouge` 1.0
does, the similarity of code as `fuzzywuzzy` does without its optional C library. Its Chinese tasks need a word
segmenter and are not scored.
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Sequence
from itertools import chain

from swa_jax.base.errors import ConfigError

_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize(text: str) -> str:
    """Lower case, without punctuation and articles, single blanks (SQuAD's normalisation)."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(_PUNCTUATION)).split())


def qa_f1(answer: str, reference: str) -> float:
    """F1 of the words in common, each as often as both have it, after `normalize`."""
    said, right = normalize(answer).split(), normalize(reference).split()
    common = sum((Counter(said) & Counter(right)).values())
    return 2 * common / (len(said) + len(right)) if common else 0.0


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L F1 of whole summaries: distinct words of the longest common subsequences of their sentences.

    Sentences end at full stops; every pair of sentences adds the words of its subsequence to one set. What is blank
    behind the last full stop counts as a sentence of one empty word, as it does in the package.
    """
    said, right = _sentences(answer), _sentences(reference)
    words_said, words_right = set(chain(*said)), set(chain(*right))
    if not words_said or not words_right:
        return 0.0
    common = {word for one in right for other in said for word in _longest_common(one, other)}
    precision, recall = len(common) / len(words_said), len(common) / len(words_right)
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentences(text: str) -> list[list[str]]:
    return [sentence.split() or [""] for sentence in text.split(".") if sentence]


def _longest_common(a: Sequence[str], b: Sequence[str]) -> list[str]:
    """A longest common subsequence; of several, the one that drops words of `b` first."""
    length = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            length[i + 1][j + 1] = length[i][j] + 1 if x == y else max(length[i][j + 1], length[i + 1][j])
    found: list[str] = []
    i, j = len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            found.append(a[i - 1])
            i, j = i - 1, j - 1
        elif length[i - 1][j] > length[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found[::-1]


def classification(answer: str, reference: str, classes: Sequence[str]) -> float:
    """1 shared among the classes that the answer names, if the right one is among them.

    A name inside the right one's does not count. (LongBench's loop overlooks every second of several such names.)
    """
    named = [name for name in classes if name in answer and not (name in reference and name != reference)]
    return 1 / len(named) if reference in named else 0.0


def retrieval(answer: str, reference: str) -> float:
    """The share of the numbers in the answer that are the reference's, which is written `Paragraph 12`."""
    right = re.search(r"Paragraph (\d+)", reference)
    if right is None:
        raise ConfigError(f"the reference names no paragraph: '{reference}'")
    return count(answer, right.group(1))


def count(answer: str, reference: str) -> float:
    """The share of the numbers in the answer that are the reference."""
    numbers = re.findall(r"\d+", answer)
    return sum(number == reference for number in numbers) / len(numbers) if numbers else 0.0


def code_similarity(answer: str, reference: str) -> float:
    """Likeness of the answer's first line without comment or backtick: 2 M / T of matched characters, in hundredths."""
    lines = answer.lstrip("\n").split("\n")
    line = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    if not line or not reference:
        return 0.0
    return round(100 * difflib.SequenceMatcher(None, line, reference).ratio()) / 100


def choice(answer: str, reference: str) -> float:
    """1 if the answer says "The correct answer is (X)", brackets or not, and X is the reference's letter."""
    return float(chosen_letter(answer) == reference)


def chosen_letter(answer: str) -> str | None:
    """The letter that a multiple-choice answer settles on, if it says so; asterisks are overlooked."""
    text = answer.replace("*", "")
    said = re.search(r"The correct answer is \(([A-D])\)", text) or re.search(r"The correct answer is ([A-D])", text)
    return said.group(1) if said else None
