"""RULER's questions among documents (qa_1: SQuAD, qa_2: HotpotQA; arXiv:2404.06654).

The documents of a question stand among others: first those that RULER takes first (of SQuAD the other paragraphs of the
same article), then any of the file. They are shuffled, and numbered. Questions come in the file's order.

RULER shows all ten paragraphs that HotpotQA has for a question. Where these do not fit, its generator does not end;
here the two with the answer stay, and of the others as many as there is room for.
"""

from __future__ import annotations

import random

from swa_jax.base.errors import ConfigError
from swa_jax.evaluate.ruler_data import QuestionFile
from swa_jax.evaluate.ruler_prompts import Draft, Filler

TASK_TEMPLATE = (
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "The following are given documents.\n\n{context}\n\n"
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\n"
    "Question: {query}"
)
ANSWER_PREFIX = " Answer:"
DOCUMENT = "Document {number}:\n{document}"
STEP = 10  # documents


def qa_filler(task: str, file: QuestionFile, depth: float | None, seed: int) -> Filler:
    """Prompts by their number of documents; `depth`, if not None, is the place of the first one with the answer."""
    rng = random.Random(seed)

    def make(size: int, number: int) -> Draft:
        if number >= len(file.questions):
            raise ConfigError(
                f"the file of {task} has {len(file.questions)} questions with an answer: ask for no more examples than "
                "that"
            )
        asked = file.questions[number]
        if size < len(asked.own):
            others = [one for one in asked.own if one not in asked.gold]
            shown = [*asked.gold, *rng.sample(others, max(0, size - len(asked.gold)))]
        elif size - len(asked.own) > len(asked.near):
            first = [*asked.own, *asked.near]
            known = set(first)
            others = [one for one in range(len(file.documents)) if one not in known]
            shown = [*first, *rng.sample(others, size - len(first))]
        else:
            shown = [*asked.own, *rng.sample(asked.near, size - len(asked.own))]
        random.Random(seed).shuffle(shown)
        if depth is not None:
            shown.remove(asked.gold[0])
            shown.insert(int(len(shown) * depth), asked.gold[0])
        documents = (DOCUMENT.format(number=i, document=file.documents[one]) for i, one in enumerate(shown, start=1))
        return Draft(
            question=TASK_TEMPLATE.format(context="\n\n".join(documents), query=asked.question),
            prefix=ANSWER_PREFIX,
            references=asked.answers,
            answer=f" {asked.answers[0]}",
            counted=f" {asked.answers}",
        )

    return Filler(task, make, STEP, most=len(file.documents))
