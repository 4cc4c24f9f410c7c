"""Judges of answers that no metric decides: a program, or a chat model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from swa_jax.base.errors import ConfigError
from swa_jax.data.reply_text import after_thinking

# A list of {type, question, reference, unanswerable, answer} -> scores from 0 to 1.
Judge = Callable[[Sequence[dict[str, Any]]], list[float]]

TRIES = 4  # requests an endpoint may refuse or lose, with pauses of 1, 2, 4 seconds between them
PROMPT = """Judge whether the answer given to a question is right.

Question ({type}): {question}
{reference_is}: {reference}
Answer given: {answer}

{rule}
Reply with the one word yes or no."""


class Rule(NamedTuple):
    """What a judge goes by. The wordings are ours; what they say of LongMemEval's types is its paper's."""

    reference_is: str
    text: str


SAME = (
    "The answer is right if it says the same as the expected answer, in whatever words, or has all steps that lead "
    "to it. It is wrong if it has only a part of what the expected answer says"
)
RULE = Rule("Expected answer", f"{SAME}, or something that contradicts it.")
# Of LongMemEval (arXiv:2410.10813), by the type of the question.
RULES: Mapping[str, Rule] = {
    "temporal-reasoning": Rule(
        "Expected answer",
        f"{SAME}. Where a number of days, weeks, months or the like is asked for, a number that is one more or one "
        "less than the expected one is right too.",
    ),
    "knowledge-update": Rule(
        "Expected answer",
        "The answer is right if it gives the expected answer, which is the newest. It may tell beside it what was true "
        "before. It is wrong if it gives only what was true before, or takes that for the newest.",
    ),
    "single-session-preference": Rule(
        "What a good answer does",
        "There is no single right answer. The answer is right if it remembers what the user has told about themselves "
        "and makes correct use of it, as described above. It need not do everything that is described.",
    ),
    "problem": Rule("Expected answer", "The answer is right if the result that it ends with is the expected one."),
}
UNANSWERABLE = Rule(
    "Why it cannot be answered",
    "The question cannot be answered. The answer is right if it says so, says what is missing, or says that only "
    "something else is known. It is wrong if it answers the question all the same.",
)


def rule_of(answer: Mapping[str, Any]) -> Rule:
    """What an answer is judged by."""
    return UNANSWERABLE if answer.get("unanswerable") else RULES.get(str(answer.get("type", "")), RULE)


def find_judge(judge: str) -> Judge:
    """`URL#MODEL` is an endpoint, such as http://localhost:8000/v1#qwen3-32b; anything else is a command."""
    if judge.startswith(("http://", "https://")):
        url, _, model = judge.partition("#")
        if not model:
            raise ConfigError(f"the judge '{judge}' names no model: write {url.rstrip('/')}#MODEL")
        return endpoint_judge(url, model)
    return command_judge(judge)


def endpoint_judge(url: str, model: str) -> Judge:
    """A chat model as judge: POST `url`/chat/completions, one question a request, greedy.

    The key, if one is needed, is read from the environment variable OPENAI_API_KEY.

    Raises:
      ConfigError: when it judges: no answer after `TRIES` requests, a refusal, or a verdict that is none.
    """
    who = f"the judge {model} at {url}"

    def judge(answers: Sequence[dict[str, Any]]) -> list[float]:
        return [_verdict(after_thinking(ask(_prompt(answer))), who) for answer in answers]

    def ask(prompt: str) -> str:
        body = {"model": model, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(
            url.rstrip("/") + "/chat/completions", json.dumps(body).encode(), headers, method="POST"
        )
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                time.sleep(2 ** (attempt - 1))
            try:
                with urllib.request.urlopen(request, timeout=120) as reply:
                    return str(json.load(reply)["choices"][0]["message"]["content"])
            except urllib.error.HTTPError as error:
                problem = f"{error.code} {error.reason}"
                if error.code not in (408, 429) and error.code < 500:
                    break  # asking again would not help
            except (OSError, TimeoutError) as error:  # URLError is an OSError
                problem = str(getattr(error, "reason", error))
            except (ValueError, LookupError, TypeError):
                problem = "its reply is not that of a chat model"
                break
        raise ConfigError(f"{who} did not judge: {problem}")

    return judge


def _prompt(answer: dict[str, Any]) -> str:
    rule = rule_of(answer)
    return PROMPT.format(
        type=answer.get("type", ""),
        question=answer.get("question", ""),
        reference_is=rule.reference_is,
        reference=answer.get("reference", ""),
        answer=answer["answer"],
        rule=rule.text,
    )


def command_judge(command: str) -> Judge:
    """A judge that is a program: JSON lines in, a verdict a line out.

    A line has type, question, reference, unanswerable and answer, and what a chat model is told beside them:
    `reference_is`, what the reference stands for, and `rule`, when an answer is right. A verdict is `yes`, `no`, or a
    number from 0 to 1. The program runs once for all answers, without a shell.

    Raises:
      ConfigError: there is no such program; or, when it judges, it fails or does not give one verdict for each answer.
    """
    words = shlex.split(command)
    if not words:
        raise ConfigError("the judge's command is empty")
    if shutil.which(words[0]) is None:
        raise ConfigError(f"the judge '{command}' cannot be started: there is no program '{words[0]}'")

    def judge(answers: Sequence[dict[str, Any]]) -> list[float]:
        rules = [{"reference_is": rule.reference_is, "rule": rule.text} for rule in map(rule_of, answers)]
        lines = "".join(json.dumps({**a, **rule}) + "\n" for a, rule in zip(answers, rules, strict=True))
        try:
            ran = subprocess.run(words, input=lines, capture_output=True, text=True, check=False)
        except OSError as error:
            raise ConfigError(f"the judge '{command}' cannot be started: {error.strerror}") from None
        if ran.returncode:
            last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
            raise ConfigError(f"the judge '{command}' ended with status {ran.returncode}: {last}")
        verdicts = [line.strip() for line in ran.stdout.splitlines() if line.strip()]
        if len(verdicts) != len(answers):
            raise ConfigError(
                f"the judge '{command}' gave {len(verdicts)} verdicts on {len(answers)} answers: it must print one "
                "line for each"
            )
        return [_verdict(verdict, f"the judge '{command}'") for verdict in verdicts]

    return judge


def _verdict(text: str, who: str) -> float:
    word = text.strip().lower().rstrip(".")
    if word in ("yes", "no"):
        return float(word == "yes")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise ConfigError(f"{who} said '{text[:80]}': it must say yes, no, or a number from 0 to 1")
    return value
