"""Judges of answers that no metric decides: a program, or a chat model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from swa_jax.errors import ConfigError

# A list of {type, question, reference, unanswerable, answer} -> scores from 0 to 1.
Judge = Callable[[Sequence[dict[str, Any]]], list[float]]

TRIES = 4  # requests an endpoint may refuse or lose, with pauses of 1, 2, 4 seconds between them
PROMPT = """A question was asked about past conversations. Decide whether the answer given is right.

Question ({type}): {question}
{expected}: {reference}
Answer given: {answer}

The answer is right if it says the same as what is expected, in whatever words, and nothing that contradicts it. {note}
Reply with the one word yes or no."""
UNANSWERABLE = (
    "The conversations do not tell: right is an answer that says so, or asks back, and invents nothing."
)


def find_judge(judge: str) -> Judge:
    """`URL#MODEL` is an endpoint, such as http://localhost:8000/v1#qwen3-32b; anything else is a command."""
    if judge.startswith(("http://", "https://")):
        url, _, model = judge.partition("#")
        if not model:
            raise ConfigError(f"the judge '{judge}' names no model: write {url.rstrip('/')}#MODEL")
        return endpoint_judge(url, model)
    return command_judge(judge)


def endpoint_judge(url: str, model: str, timeout: float = 120.0) -> Judge:
    """A chat model as judge: POST `url`/chat/completions, one question a request, greedy.

    The key, if one is needed, is read from the environment variable OPENAI_API_KEY.

    Raises:
      ConfigError: when it judges: no answer after `TRIES` requests, a refusal, or a verdict that is none.
    """
    who = f"the judge {model} at {url}"

    def judge(answers: Sequence[dict[str, Any]]) -> list[float]:
        return [_verdict(ask(_prompt(answer)), who) for answer in answers]

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
                with urllib.request.urlopen(request, timeout=timeout) as reply:
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
    lost = answer.get("unanswerable", False)
    return PROMPT.format(
        type=answer.get("type", ""),
        question=answer.get("question", ""),
        expected="Why it cannot be answered" if lost else "Expected",
        reference=answer.get("reference", ""),
        answer=answer["answer"],
        note=UNANSWERABLE if lost else "",
    )


def command_judge(command: str) -> Judge:
    """A judge that is a program: JSON lines in (type, question, reference, unanswerable, answer), a verdict a line out.

    A verdict is `yes`, `no`, or a number from 0 to 1. The program runs once for all answers, without a shell.

    Raises:
      ConfigError: when it judges: the program fails, or does not give one verdict for each answer.
    """
    words = shlex.split(command)
    if not words:
        raise ConfigError("the judge's command is empty")

    def judge(answers: Sequence[dict[str, Any]]) -> list[float]:
        lines = "".join(json.dumps(answer) + "\n" for answer in answers)
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
