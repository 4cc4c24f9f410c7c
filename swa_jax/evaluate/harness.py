"""lm-evaluation-harness on a model under any pattern: its `LM` class (extra `[eval]`, lm-eval 0.4.11 or newer).

Log-likelihoods come from `score_answers` and texts from `generate`, so the harness's numbers are those of the library.
Nothing is cut: a request that does not fit the context is an error that says how long it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from swa_jax.base.errors import ConfigError, not_installed
from swa_jax.base.estimates import interval_of_score
from swa_jax.data.tokenizer import Tokenizer
from swa_jax.evaluate.examples import Example
from swa_jax.evaluate.nll import score_answers
from swa_jax.model.decoder import Decoder
from swa_jax.model.generate import generate
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import Window

try:
    from lm_eval.api.model import LM  # type: ignore[import-not-found,unused-ignore]
except ModuleNotFoundError as error:
    if error.name != "lm_eval":
        raise
    raise not_installed("evaluate harness needs lm-evaluation-harness", extra="eval") from None


class HarnessRequest(Protocol):
    """What is used of the harness's `Instance`."""

    args: tuple[Any, ...]


class HarnessModel(LM):  # type: ignore[misc,unused-ignore]
    """A model and its tokenizer as the harness wants them.

    Args:
      max_length: tokens of a request with its answer; None takes the config's `max_position_embeddings`.
      chat: `chat_text` of the model's folder; requests are then texts of chats, which bring their start
        tokens.

    Raises:
      ConfigError: by every method, for a request longer than `max_length`, or one that the harness's API does not
        allow; the sentence says which.
    """

    def __init__(
        self,
        model: Decoder,
        tokenizer: Tokenizer,
        *,
        batch_size: int = 8,
        max_length: int | None = None,
        chat: Callable[..., str] | None = None,
    ):
        super().__init__()
        self.chat = chat
        self.model, self.tokenizer, self.batch_size = model, tokenizer, batch_size
        self.max_length = model.config.max_position_embeddings if max_length is None else max_length

    def loglikelihood(self, requests: Sequence[HarnessRequest], **_: Any) -> list[tuple[float, bool]]:
        """(log-probability in nats, is it what greedy decoding gives) of each (context, continuation)."""
        examples = [self._example(*request.args) for request in requests]
        return list(zip(*self._score(examples, self.model.pattern), strict=True))

    def loglikelihood_rolling(self, requests: Sequence[HarnessRequest], **_: Any) -> list[float]:
        """Log-probability in nats of each whole text, after a start or end token.

        A text that is longer than the context is read in windows that do not share a prediction; the last one reaches
        back as far as the context allows. Texts are prompts: full-attention decode does not apply to them.
        """
        windows: list[Example] = []
        owner: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tokenizer.encode(request.args[0])
            parts = rolling_windows(tokens, self._prefix(), self.max_length)
            windows += [Example(context, predicted, []) for context, predicted in parts]
            owner += [number] * len(parts)
        total = np.zeros(len(requests))
        if windows:
            as_prompts = self.model.pattern.with_window(Window(full_decode=False))
            np.add.at(total, owner, self._score(windows, as_prompts)[0])
        return total.tolist()

    def generate_until(self, requests: Sequence[HarnessRequest], **_: Any) -> list[str]:
        """The text generated after each context, up to the first of its `until` strings or an end token."""
        texts = [""] * len(requests)
        prompts = [self._context(request.args[0]) for request in requests]
        groups: dict[tuple[tuple[str, Any], ...], list[int]] = {}
        for number, request in enumerate(requests):
            options = _sampling(request.args[1])
            new = dict(options)["max_new_tokens"]
            self._check(len(prompts[number]) + new, f"a prompt with max_gen_toks = {new}")
            groups.setdefault(options, []).append(number)
        stop = self.tokenizer.end_ids
        for options, numbers in groups.items():
            numbers.sort(key=lambda n: len(prompts[n]))
            for start in range(0, len(numbers), self.batch_size):
                some = numbers[start : start + self.batch_size]
                # The seed is of the batch: a task that repeats its prompts wants other samples in each.
                rows = generate(self.model, [prompts[n] for n in some], stop_tokens=stop, seed=start, **dict(options))
                for n, row in zip(some, rows, strict=True):
                    texts[n] = cut_at(self.tokenizer.decode(row), _until(requests[n].args[1]))
        return texts

    def apply_chat_template(self, chat_history: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> str:
        """The text of a chat, whose last message is the beginning of an answer if no prompt for one is to be added."""
        assert self.chat is not None
        return self.chat(chat_history, add_generation_prompt)

    @property
    def tokenizer_name(self) -> str:
        """What the harness tells kept requests apart by; we keep none."""
        return "own"

    def _example(self, context: str, continuation: str) -> Example:
        """Blanks at the end of the context belong to the continuation; both are tokenised together."""
        kept = context.rstrip()
        if kept:
            prompt, whole = self._context(kept), self._context(context + continuation)
        else:
            prompt = [self._prefix()]
            whole = prompt + self.tokenizer.encode(context + continuation)
        self._check(len(whole), "a context with its continuation")
        return Example(prompt, whole[len(prompt) :], [])

    def _score(self, examples: Sequence[Example], pattern: AttentionPattern) -> tuple[list[float], list[bool]]:
        """Sums over the answers' tokens; an empty answer is certain."""
        some = [example for example in examples if example.answer]
        log, exact = np.zeros(len(examples)), np.ones(len(examples), bool)
        if some:
            where = [i for i, example in enumerate(examples) if example.answer]
            scores = score_answers(self.model, some, batch_size=self.batch_size, pattern=pattern)
            log[where] = -scores.nll * [len(example.answer) for example in some]
            exact[where] = scores.right
        return log.tolist(), exact.tolist()

    def _context(self, text: str) -> list[int]:
        start = [] if self.chat else self.tokenizer.start_ids
        return [*start, *self.tokenizer.encode(text)] or [self._prefix()]

    def _prefix(self) -> int:
        """What stands before a text that has no context: as in the harness, the start token, also where the tokenizer
        has one and does not put it before texts, or else the end token."""
        start_ids, bos, eos = self.tokenizer.start_ids, self.tokenizer.bos_id, self.tokenizer.eos_id
        prefix = start_ids[-1] if start_ids else eos if bos is None else bos
        if prefix is None:
            raise ConfigError("the tokenizer has neither a start nor an end token to put before a text")
        return prefix

    def _check(self, length: int, what: str) -> None:
        if length > self.max_length:
            raise ConfigError(
                f"{what} takes {length} tokens, more than max_length = {self.max_length}: raise --max-length (beyond "
                "the context that the model was trained with, if need be) or choose shorter tasks; nothing is cut"
            )


def rolling_windows(tokens: Sequence[int], prefix: int, max_length: int) -> list[tuple[list[int], list[int]]]:
    """(context, predicted) pieces that predict every token once, each from at most `max_length` tokens of text.

    The first piece follows `prefix`; the last one's context is as long as it can be.
    """
    text = [prefix, *tokens]
    pieces = []
    for start in range(0, len(tokens), max_length):
        end = min(start + max_length, len(tokens))
        first = max(0, end - max_length)
        pieces.append((text[first : start + 1], text[start + 1 : end + 1]))
    return pieces


def cut_at(text: str, until: Sequence[str]) -> str:
    """The text before the first of the strings."""
    ends = [text.index(stop) for stop in until if stop and stop in text]
    return text[: min(ends)] if ends else text


def _until(options: Mapping[str, Any]) -> list[str]:
    until = options.get("until") or []
    return [until] if isinstance(until, str) else list(until)


def _sampling(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The harness's generation settings as those of `generate`, hashable."""
    known = {"until", "do_sample", "temperature", "top_k", "top_p", "max_gen_toks", "max_new_tokens"}
    if unknown := set(options) - known:
        raise ConfigError(f"generation option '{min(unknown)}' is not supported; known: {', '.join(sorted(known))}")
    new = options.get("max_gen_toks", options.get("max_new_tokens", 256))
    temperature = float(options.get("temperature", 1.0 if options.get("do_sample") else 0.0))
    if not options.get("do_sample", temperature > 0):
        temperature = 0.0
    chosen = {"max_new_tokens": int(new), "temperature": temperature}
    if temperature:
        chosen |= {name: options[name] for name in ("top_k", "top_p") if name in options}
    return tuple(sorted(chosen.items()))


def run_harness(
    model: HarnessModel, tasks: Sequence[str], *, folder: str | Path | None = None, limit: int | None = None
) -> list[dict[str, Any]]:
    """The harness on these tasks: a row for every task, filter and metric, with its 95 % interval.

    The interval is ours, over documents (the harness would fork this process for its own): Wilson's where every
    document is right or wrong, else a bootstrap. It is None where the metric is neither a mean over documents nor the
    perplexity or the bits of one.

    Args:
      tasks: names known to the harness, or defined by YAML files in `folder`.
      limit: the first so many documents of each task only; None takes all.

    Raises:
      ConfigError: a task that the harness does not know.
    """
    import lm_eval  # type: ignore[import-not-found,unused-ignore]
    from lm_eval.tasks import TaskManager  # type: ignore[import-not-found,unused-ignore]

    manager = TaskManager(include_path=None if folder is None else str(folder))
    for task in tasks:
        if task not in manager.all_tasks:
            where = ": name the folder of its YAML file" if folder is None else f", and {folder} defines none"
            raise ConfigError(f"lm-evaluation-harness has no task '{task}'{where}")
    found = lm_eval.simple_evaluate(
        model,
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        bootstrap_iters=0,
        apply_chat_template=model.chat is not None,
        fewshot_as_multiturn=model.chat is not None,
    )
    rows = []
    for task, scores in found["results"].items():
        for name, score in scores.items():
            metric, _, chain = name.partition(",")
            if not chain or metric.endswith("_stderr") or not isinstance(score, int | float):
                continue
            documents = [s for s in found["samples"].get(task, []) if s.get("filter", chain) == chain]
            interval = interval_of_score(float(score), [document.get(metric) for document in documents])
            count = len(documents) or None
            rows.append(dict(task=task, filter=chain, metric=metric, score=float(score), interval=interval, n=count))
    return rows
