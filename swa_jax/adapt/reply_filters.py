"""Which replies of a model are good enough to train on."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from typing import Any

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import nearest
from swa_jax.data.reply_text import after_thinking
from swa_jax.evaluate.judges import find_judge

# (the prompt's record, the reply's line, where the prompt stands) -> whether the reply is kept.
Filter = Callable[[dict[str, Any], dict[str, Any], str], bool]

KINDS = ("none", "exact", "contains", "judge", "program")
RIGHT = 0.5  # a judge's verdict from which on a reply is kept


def find_filter(text: str, answer_field: str) -> Filter:
    """The filter that a text names: none, exact, contains, `judge:JUDGE` or `program:COMMAND`.

    Args:
      answer_field: the field of a prompt's record that holds what is right: a text, or several of which one is enough.

    Raises:
      ConfigError: there is no such filter. It raises the same when it judges and cannot.
    """
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise ConfigError(f"--filter is '{kind}'{nearest(kind, KINDS)}")
    if bool(rest) != (kind in ("judge", "program")):
        raise ConfigError(
            f"--filter {kind} takes nothing after it" if rest else f"--filter {kind} needs what decides: {kind}:COMMAND"
        )
    if kind == "none":
        return lambda record, reply, where: True
    if kind == "program":
        return _program(rest)
    if kind == "judge":
        return _judge(rest, answer_field)

    def matches(record: dict[str, Any], reply: dict[str, Any], where: str) -> bool:
        answer = final_answer(reply["text"])
        right = [expected.strip() for expected in _answers(record, answer_field, where)]
        return answer in right if kind == "exact" else any(expected in answer for expected in right)

    return matches


def check_records(text: str, answer_field: str, records: Sequence[dict[str, Any]], where: str) -> None:
    """Raise `ConfigError` if a filter compares with right answers and a record has none."""
    if text.partition(":")[0] in ("exact", "contains", "judge"):
        for number, record in enumerate(records):
            _answers(record, answer_field, f"{where} {number}")


def final_answer(text: str) -> str:
    """What a reply says after its thinking, without blanks around it."""
    return after_thinking(text).strip()


def _answers(record: dict[str, Any], field: str, where: str) -> list[str]:
    value = record.get(field)
    answers: list[Any] = value if isinstance(value, list) else [value]
    if not answers or not all(isinstance(answer, str) and answer.strip() for answer in answers):
        raise ConfigError(
            f"{where} has no '{field}' to compare with: it must be a text, or a list of texts, that are not empty"
        )
    return answers


def _judge(judge: str, answer_field: str) -> Filter:
    """Judges as `swa-jax evaluate questions` has them, asked about one reply at a time."""
    decide = find_judge(judge)

    def kept(record: dict[str, Any], reply: dict[str, Any], where: str) -> bool:
        asked = {
            "type": record.get("type", ""),
            "question": record.get("question") or reply["prompt_text"],
            "reference": " / ".join(_answers(record, answer_field, where)),
            "unanswerable": False,
            "answer": final_answer(reply["text"]),
        }
        return decide([asked])[0] >= RIGHT

    return kept


def _program(command: str) -> Filter:
    """A program that gets one JSON object on its standard input and keeps the reply by status 0, refuses it by 1."""
    words = shlex.split(command)
    if not words:
        raise ConfigError("the filter's command is empty")
    if shutil.which(words[0]) is None:
        raise ConfigError(f"the filter '{command}' cannot be started: there is no program '{words[0]}'")

    def kept(record: dict[str, Any], reply: dict[str, Any], where: str) -> bool:
        try:
            status = subprocess.run(
                words, input=json.dumps({"record": record} | reply), text=True, check=False
            ).returncode
        except OSError as error:
            raise ConfigError(f"the filter '{command}' cannot be started: {error.strerror}") from None
        if status not in (0, 1):
            raise ConfigError(
                f"the filter '{command}' ended with status {status} on the reply to {where}: 0 keeps a reply, 1 leaves "
                "it out"
            )
        return status == 0

    return kept
