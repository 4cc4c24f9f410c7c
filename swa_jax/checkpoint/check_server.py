"""Says what a server really computes: the model as it was exported, or something else.

    python check_server.py --url http://localhost:8000     # vLLM, SGLang, llama.cpp, any completions endpoint
    python check_server.py --transformers                  # transformers, in this process

`canary.json` beside this file has probes, which are lists of token ids, and the log-probabilities that the model gives
their tokens: as it was exported, and read wrongly in each of many ways. The server is asked for the same
log-probabilities, for each probe alone and for all probes in one request. The nearest reading is what it computes.
Then the server answers a few prompts, greedily, and so in the next turn; its answers are compared as long as their
tokens are those of the canary.

The exit code is 0 for right, 1 for wrong, and 2 where nothing can be said. Needs numpy; `--transformers` needs
transformers and torch.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

RIGHT, WRONG, UNKNOWN = 0, 1, 2  # exit codes
CANARY_FILE = "canary.json"
FORMAT = 1
TOP = 5  # log-probabilities of the likeliest tokens, for servers that give no others
FINEST = 1e-3  # mean differences below this are rounding: servers print as few as 5 digits
MOST_ROUNDING = 3.0  # times what bfloat16 gives here: a server rounds elsewhere, and more often
EVIDENCE = 30.0  # nats by which the nearest reading has to be likelier than another one
UNEVEN = 4.0  # times: how much larger differences are where attention matters, if the reason is attention
MOST_SECONDS = 600  # of one answer
SLACK = 3e-4  # of a mean difference, when two of them are compared
# How log-probabilities are asked for, and where the answer has them; the last gives only those of what comes next.
TOKEN_ID = "token_id:"  # before the number, in place of a token's text
APIS = {"vllm": "prompt_logprobs", "sglang": "input_token_logprobs", "echo": "token_logprobs", "top": "top_logprobs"}
Answers = list[tuple["Case", np.ndarray]]  # to the probes one by one, and to all of them in one request
Answer = Callable[[list[int], int], tuple[list[int], list[list[float]]]]  # as `Endpoint.answer`


class CannotAsk(Exception):
    """The server, or the folder, gave no log-probabilities; the message is one sentence."""


# ---- judging ----


class Case(NamedTuple):
    """What a set of answers is compared with.

    Attributes:
      readings: the canary's readings, the right one first.
      expected: [readings, N], the log-probabilities by reading.
      rounded: [N], the right ones computed in bfloat16.
      control: [N] bool, where no reading of the attention pattern makes a difference.
      first: [N] bool, behind a probe's first token alone, where positions make none either.
    """

    readings: list[dict[str, Any]]
    expected: np.ndarray
    rounded: np.ndarray
    control: np.ndarray
    first: np.ndarray

    @property
    def rounding(self) -> np.ndarray:
        """[N], how far the rounded ones are from the others."""
        return np.abs(self.rounded - self.expected[0])

    def evidence(self, observed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean differences [readings], and by how many nats the nearest reading is likelier than each.

        The likelihood is Laplace's, whose width is the nearest reading's mean difference: a few large differences, as
        where a token changes its expert, do not decide.
        """
        distances = np.abs(observed - self.expected).mean(axis=1)
        nearest = distances.min()
        return distances, (distances - nearest) * len(observed) / max(nearest, FINEST)


def prompt_case(canary: dict[str, Any], what: str, batch: bool = False) -> Case:
    """`what` is "log_probs" (of the probes' tokens) or "top" (of the likeliest tokens behind some prompts)."""
    readings = [r for r in canary["readings"] if batch or not r.get("batch_only")]
    # The whole probes come first among the prompts.
    count = len(canary["probes"] if what == "log_probs" or batch else canary["top"])
    if what == "log_probs":
        control = [np.arange(len(p["positions"])) < p["control"] for p in canary["probes"]]
        first = [np.asarray(p["positions"]) == 0 for p in canary["probes"]]
    else:
        control = [np.full(TOP, p["control"]) for p in canary["top"][:count]]
        first = [np.zeros(TOP, bool)] * count
    expected = np.stack([_flat(r[what][:count]) for r in readings])
    rounded = _flat(canary["bfloat16"][what][:count])
    return Case(readings, expected, rounded, np.concatenate(control), np.concatenate(first))


def answer_case(prompts: Case, answers: dict[str, Any]) -> Case:
    """What prompts and generated tokens are compared with, by the readings of these. Prompts are the controls."""
    expected = np.stack([np.append(prompts.expected[0], _flat(r["values"])) for r in answers["readings"]])
    rounded = np.append(prompts.rounded, _flat(answers["bfloat16"]))
    control = np.arange(len(rounded)) < len(prompts.rounded)
    return Case(answers["readings"], expected, rounded, control, np.zeros_like(control))


def _flat(values: Sequence[Sequence[float]]) -> np.ndarray:
    return np.concatenate([np.asarray(row, np.float64) for row in values])


def judge(observed: np.ndarray, case: Case, usual: np.ndarray | None = None, why: str = "") -> dict[str, Any]:
    """What the answers say: {"verdict", "sentence", "nearest", "differences"}.

    The verdict is right if no reading is clearly nearer than the right one, its differences are no larger than rounding
    makes them, and they are no larger where attention or positions matter than elsewhere. So a fault that no reading
    has is not right either. `usual` [readings] bool: what a server in bfloat16 leaves no doubt about; `why` this one
    does. None: that follows from the case.
    """
    usual = case.evidence(case.rounded)[1] >= EVIDENCE if usual is None else usual
    distances, evidence = case.evidence(observed)
    best = 0 if evidence[0] < EVIDENCE else int(np.argmin(distances))
    found = {
        "nearest": case.readings[best]["name"],
        "differences": {r["name"]: round(float(d), 6) for r, d in zip(case.readings, distances, strict=True)},
    }
    rivals = [i for i in range(len(case.readings)) if i != best and evidence[i] < EVIDENCE]
    residual = np.abs(observed - case.expected[best])
    limit = max(4 * FINEST, MOST_ROUNDING * case.rounding.mean())
    verdict, sentence = _verdict(case, observed, best, rivals, residual, limit)
    if verdict == RIGHT and (doubtful := [case.readings[i]["sentence"] for i in rivals if usual[i]]):
        why = why or f"it rounds too much ({residual.mean():.2g}) to say which"
        verdict, sentence = UNKNOWN, f"cannot tell: right, or {_either(doubtful)}; {why}"
    return {"verdict": verdict, "sentence": sentence, **found}


def _verdict(
    case: Case, observed: np.ndarray, best: int, rivals: list[int], residual: np.ndarray, limit: float
) -> tuple[int, str]:
    name = case.readings[best]["sentence"]
    size = float(residual.mean())
    if size > limit:
        return _nothing_fits(case, observed, best, size, limit)
    uneven = _uneven(residual, case, case.control) or _uneven(residual, case, case.first)
    if best == 0 and uneven:
        return WRONG, f"wrong: log-probabilities differ by {size:.2g} in a way that rounding does not explain"
    if best == 0:
        close = [case.readings[i]["sentence"] for i in rivals]
        also = f"; with this mistake it would look the same: {_either(close)}" if close else ""
        return RIGHT, f"right: {name} (log-probabilities differ by {size:.2g} on average, which is rounding){also}"
    others = [case.readings[i]["sentence"] for i in rivals]
    also = f" (or {_either(others)})" if others else ""
    nearly = ", or nearly so" if uneven else ""
    return WRONG, f"wrong: {name}{also}{nearly}"


def _nothing_fits(case: Case, observed: np.ndarray, best: int, size: float, limit: float) -> tuple[int, str]:
    """The verdict where even the nearest reading is further away than rounding explains."""
    nearest = case.readings[best]["sentence"] if best else "the right model"
    off = np.abs(observed - case.expected[0])
    early = float(off[case.control].mean()) if case.control.any() else size
    late = float(off[~case.control].mean()) if not case.control.all() else early
    if early <= limit < late:
        return WRONG, f"wrong: attention differs, by none of the mistakes known here; the nearest is {nearest}"
    if best == 0 and size <= 4 * limit and late <= 2 * early:
        return UNKNOWN, (
            f"cannot tell: the log-probabilities differ by {size:.2g} everywhere (rounding to bfloat16 would be "
            f"{case.rounding.mean():.2g}): perhaps the weights are quantised. The right model is nearest"
        )
    return WRONG, (
        f"wrong: the log-probabilities differ by {off.mean():.2g}, also where attention does not matter: other "
        f"weights or rotary embeddings? The nearest is {nearest}"
    )


def _uneven(residual: np.ndarray, case: Case, control: np.ndarray) -> bool:
    """Whether differences grow from the controls on by more than rounding's do."""
    if not control.any() or control.all():
        return False
    early, late = residual[control].mean(), residual[~control].mean()
    usual_early, usual_late = (case.rounding[mask].mean() for mask in (control, ~control))
    if early >= usual_early / 5 and late <= 1.5 * usual_late:
        return False  # a server in bfloat16
    return bool(late > UNEVEN * early * max(1.0, usual_late / max(usual_early, 1e-9)) + SLACK)


def _either(sentences: list[str]) -> str:
    shown = sentences[:3]
    more = f" (and {len(sentences) - 3} more)" if len(sentences) > 3 else ""
    return " or ".join(shown) + more


# ---- asking a server ----


class Endpoint:
    """A server's completions endpoint."""

    def __init__(self, url: str, model: str | None = None, key: str | None = None) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.key = key
        self.model = model or self._first_model()

    def _first_model(self) -> str:
        models = self._send("/v1/models").get("data") or []
        if not models:
            raise CannotAsk(f"{self.url}/v1/models names no model: give --model")
        return models[0]["id"]

    def _send(self, path: str, body: dict[str, Any] | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=MOST_SECONDS) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace").strip()[:200]
            raise CannotAsk(f"{self.url}{path} answers {error.code}: {' '.join(text.split())}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise CannotAsk(f"{self.url}{path} cannot be asked: {reason}") from None

    def _choices(self, prompts: list[list[int]], **options: Any) -> list[dict[str, Any]]:
        body = {"model": self.model, "prompt": prompts, "max_tokens": 1, "temperature": 0, **options}
        choices = self._send("/v1/completions", body).get("choices") or []
        if len(choices) != len(prompts):
            raise CannotAsk(f"{self.url} gave {len(choices)} answers to {len(prompts)} prompts in one request")
        return sorted(choices, key=lambda choice: choice.get("index", 0))

    def _native(self, prompts: list[list[int]], count: int, **options: Any) -> list[dict[str, Any]]:
        """What SGLang says of prompts and `count` greedy tokens behind each."""
        sampling = {"max_new_tokens": count, "temperature": 0, "repetition_penalty": 1.0}
        body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True, **options}
        return [answer["meta_info"] for answer in self._send("/generate", body)]

    def prompt_log_probs(self, prompts: list[list[int]], api: str) -> list[list[float]] | None:
        """For each prompt the log-probabilities of its tokens from the second on, or None without them."""
        found = []
        if api == "vllm":
            for prompt, choice in zip(prompts, self._choices(prompts, prompt_logprobs=0), strict=True):
                rows = choice.get("prompt_logprobs")
                if not rows:
                    return None
                rows = rows[-len(prompt) :]  # a token that was put in front is left out
                if any(row is not None and str(t) not in row for t, row in zip(prompt, rows, strict=True)):
                    raise CannotAsk("the server's log-probabilities are of other tokens than were sent")
                found.append(
                    [None if row is None else row[str(t)]["logprob"] for t, row in zip(prompt, rows, strict=True)]
                )
        elif api == "sglang":
            for prompt, said in zip(prompts, self._native(prompts, 1, logprob_start_len=0), strict=True):
                rows = said.get("input_token_logprobs")
                if not rows:
                    return None
                found.append([row[0] for row in rows[-len(prompt) :]])
        else:
            for prompt, choice in zip(prompts, self._choices(prompts, echo=True, logprobs=1), strict=True):
                rows = (choice.get("logprobs") or {}).get("token_logprobs") or []
                if len(rows) <= len(prompt):  # with the one that was generated there is one more
                    return None
                found.append(rows[-len(prompt) - 1 : -1])
        return [[np.nan if x is None else float(x) for x in rows[1:]] for rows in found]

    def answer(self, prompt: list[int], count: int, api: str) -> tuple[list[int], list[list[float]]]:
        """`count` greedy tokens, or fewer, and for each the log-probabilities of the likeliest ones [TOP], falling."""
        if api == "sglang":
            (said,) = self._native([prompt], count, top_logprobs_num=TOP)
            tokens = [row[1] for row in said["output_token_logprobs"]]
            likeliest = [[one[0] for one in row] for row in said["output_top_logprobs"]]
        else:
            options: dict[str, Any] = {"max_tokens": count, "logprobs": TOP, "return_tokens_as_token_ids": True}
            if api == "vllm":  # where the folder has a generation_config.json, vLLM starts from it
                options["repetition_penalty"] = 1.0
            names, likeliest = _generated(self._choices([prompt], **options)[0])
            if not all(name.startswith(TOKEN_ID) for name in names):
                raise CannotAsk(f"{self.url} does not say the ids of the tokens that it generates")
            tokens = [int(name.removeprefix(TOKEN_ID)) for name in names]
        likeliest = [sorted(row, reverse=True)[:TOP] for row in likeliest[: len(tokens)]]
        if not tokens or [len(row) for row in likeliest] != [TOP] * len(tokens):
            raise CannotAsk(f"{self.url} does not give the {TOP} likeliest tokens of each that it generates")
        return tokens, likeliest

    def top_log_probs(self, prompts: list[list[int]]) -> list[list[float]]:
        """For each prompt the log-probabilities of the likeliest next tokens [TOP], falling."""
        for options in ({}, {"return_tokens_as_token_ids": True}):  # by their texts, which two tokens may share
            rows = [_generated(choice)[1] or [[]] for choice in self._choices(prompts, logprobs=TOP, **options)]
            found = [sorted(first, reverse=True)[:TOP] for first, *_ in rows]
            fewest = min(map(len, found))
            if fewest == TOP:
                return found
        raise CannotAsk(f"{self.url} gives the log-probabilities of {fewest} next tokens, not {TOP}")


def _generated(choice: dict[str, Any]) -> tuple[list[str], list[list[float]]]:
    """The tokens of an answer by their names, and for each the log-probabilities of the likeliest ones."""
    said = choice.get("logprobs") or {}
    if "content" in said:  # llama.cpp
        rows = said["content"] or []
        names = [f"{TOKEN_ID}{row['id']}" for row in rows]
        return names, [[one["logprob"] for one in row["top_logprobs"]] for row in rows]
    rows = said.get("top_logprobs") or []
    return [str(name) for name in said.get("tokens") or []], [[*(row or {}).values()] for row in rows]


def ask(endpoint: Endpoint, canary: dict[str, Any], api: str = "auto") -> tuple[Answers, str]:
    """The answers, and how they were asked for."""
    probes = [probe["tokens"] for probe in canary["probes"]]
    problems = []
    for one in APIS if api == "auto" else (api,):
        try:
            if one == "top":
                return _ask_top(endpoint, canary, probes), one
            alone = [endpoint.prompt_log_probs([probe], one) for probe in probes]
            together = endpoint.prompt_log_probs(probes, one)
        except Exception as error:  # whatever shape the answer has
            problems.append(_reason(error))
            continue
        if together is None or any(rows is None for rows in alone):
            problems.append(f"its answer has no {APIS[one]}")
            continue
        return _compared(canary, [rows[0] for rows in alone if rows], together), one
    raise CannotAsk(problems[0] if len({*problems}) == 1 else "; ".join(problems))


def _reason(error: Exception) -> str:
    return str(error) if isinstance(error, CannotAsk) else f"unexpected answer ({error!r:.200})"


def _ask_top(endpoint: Endpoint, canary: dict[str, Any], probes: list[list[int]]) -> Answers:
    prompts = [probes[p["probe"]][: p["length"]] for p in canary["top"]]
    alone = [endpoint.top_log_probs([prompt])[0] for prompt in prompts]
    together = endpoint.top_log_probs(probes)
    return [(prompt_case(canary, "top", b), np.concatenate(rows)) for b, rows in ((False, alone), (True, together))]


def _compared(canary: dict[str, Any], alone: list[list[float]], together: list[list[float]]) -> Answers:
    return [(prompt_case(canary, "log_probs", b), _at(canary, rows)) for b, rows in ((False, alone), (True, together))]


def _at(canary: dict[str, Any], rows: list[list[float]]) -> np.ndarray:
    """The answers [N] at the positions that the canary knows, from those of all tokens of each probe."""
    try:
        found = [np.asarray(row, float)[p["positions"]] for p, row in zip(canary["probes"], rows, strict=True)]
    except IndexError:
        raise CannotAsk("the server gave fewer log-probabilities than a probe has tokens") from None
    observed = np.concatenate(found)
    if not np.isfinite(observed).all():
        raise CannotAsk("the server gave log-probabilities that are no numbers")
    return observed


# ---- asking transformers ----


def ask_transformers(folder: Path, canary: dict[str, Any], dtype: str = "float32") -> tuple[Answers, Answer]:
    """As `ask`, of the folder in transformers' own class, and what asks for more; the batch is padded on the left."""
    try:
        torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    except ImportError as error:
        raise CannotAsk(f"--transformers needs transformers and torch: {error}") from None
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    except Exception as error:  # whatever transformers raises, nothing can be said
        raise CannotAsk(f"transformers cannot load {folder}: {_last_line(error)}") from None
    probes = [probe["tokens"] for probe in canary["probes"]]

    def log_probs(prompts: list[list[int]]) -> list[list[float]]:
        width = max(map(len, prompts))
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        tokens = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            logits = model(tokens, attention_mask=mask, position_ids=positions, use_cache=False).logits
        found = torch.log_softmax(logits[:, :-1].float(), -1).gather(2, tokens[:, 1:, None])[..., 0]
        return [row[len(row) + 1 - len(p) :].tolist() for row, p in zip(found, prompts, strict=True)]

    def answer(prompt: list[int], count: int) -> tuple[list[int], list[list[float]]]:
        options = {"do_sample": False, "repetition_penalty": 1.0, "pad_token_id": 0}
        options |= {"max_new_tokens": count, "output_logits": True, "return_dict_in_generate": True}
        said = model.generate(torch.tensor([prompt]), **options)
        rows = torch.log_softmax(torch.cat(said.logits).float(), -1).topk(TOP).values
        return said.sequences[0, len(prompt) :].tolist(), rows.tolist()

    try:
        return _compared(canary, [log_probs([probe])[0] for probe in probes], log_probs(probes)), answer
    except Exception as error:  # from within a model's class
        raise CannotAsk(f"transformers loads {folder}, and fails to run it: {_last_line(error)}") from None


def _last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:200]


# ---- the answer ----


def conclude(answers: Answers, canary: dict[str, Any], answer: Answer) -> dict[str, Any]:
    """One verdict of those on single requests, on the batch, and on what is generated: the first that is not right."""
    alone, together = (judge(observed, case) for case, observed in answers)
    found = {"single": alone, "batch": together}
    if alone["verdict"] != RIGHT:
        return {**alone, **found}
    if together["verdict"] != RIGHT:
        return {**together, "sentence": f"{together['sentence']} (in a batch; right for single requests)", **found}
    if "answers" not in canary:
        return {**alone, **found}
    try:
        generated = _judge_generated(*answers[0], canary["answers"], answer)
    except Exception as error:  # also from within a model's class
        generated = {"verdict": UNKNOWN, "sentence": f"cannot tell what is generated: {_reason(error)}"}
    found["generated"] = generated
    if generated["verdict"] != RIGHT:
        return {**generated, "sentence": f"{generated['sentence']} (prompts are right)", **found}
    return {**alone, **found}


def _judge_generated(case: Case, observed: np.ndarray, answers: dict[str, Any], answer: Answer) -> dict[str, Any]:
    """The verdict on generated tokens; `case` and `observed` are of the prompts.

    Behind the first token that differs, its context differs too: nothing is compared there. The keys of a first
    answer that differs are not those of the next turn either.
    """
    whole = answer_case(case, answers)
    kept, rows = [np.ones(len(observed), bool)], [observed]
    agreed: list[int] = []
    held = 0  # tokens of the last answer that agree and whose keys the server has: the last token's were not needed
    for question in answers["questions"]:
        wanted = question["answer"]
        tokens, likeliest = answer(question["tokens"], len(wanted)) if wanted else ([], [])
        same = [*(a == b for a, b in zip(tokens, wanted, strict=False)), False].index(False)
        steps = min(same + 1, len(tokens), len(wanted))
        if question["next_turn"] and held < answers["cached"]:
            steps = 0
        held = min(same, len(tokens) - 1)
        agreed.append(same)
        kept.append(np.arange(len(wanted) * TOP) < steps * TOP)
        rows.append(np.asarray(likeliest[:steps], float).ravel())
    heard, mask = np.concatenate(rows), np.concatenate(kept)
    if not np.isfinite(heard).all():
        raise CannotAsk("its log-probabilities are no numbers")
    part = whole._replace(**{name: getattr(whole, name)[..., mask] for name in Case._fields[1:]})
    usual = whole.evidence(whole.rounded)[1] >= EVIDENCE
    why = "" if mask.all() else f"an answer leaves the exported model's at token {min(agreed) + 1}"
    return {**judge(heard, part, usual, why), "agreed": agreed}


def read_canary(file: Path) -> dict[str, Any]:
    try:
        canary = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CannotAsk(f"{file} cannot be read: {error}") from None
    if not isinstance(canary, dict) or canary.get("format") != FORMAT:
        raise CannotAsk(f"{file} is no canary of format {FORMAT}")
    return canary


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--url", help="of the server, such as http://localhost:8000")
    parser.add_argument("--model", help="the name that the server knows the model by; its first one by default")
    parser.add_argument("--key", help="an API key, if the server wants one")
    parser.add_argument("--api", choices=("auto", *APIS), default="auto", help="how to ask for log-probabilities")
    parser.add_argument("--transformers", action="store_true", help="run the folder in transformers instead")
    parser.add_argument("--dtype", default="float32", help="for transformers: float32, bfloat16 or float16")
    parser.add_argument("--canary", type=Path, default=Path(__file__).with_name(CANARY_FILE))
    parser.add_argument("--json", action="store_true", help="print everything that was found, as JSON")
    options = parser.parse_args(arguments)
    if bool(options.url) == options.transformers:
        parser.error("give --url or --transformers")
    try:
        canary = read_canary(options.canary)
        if options.transformers:
            api, (answers, answer) = "transformers", ask_transformers(options.canary.parent, canary, options.dtype)
        else:
            endpoint = Endpoint(options.url, options.model, options.key)
            answers, api = ask(endpoint, canary, options.api)
            answer = functools.partial(endpoint.answer, api=api)
        found = {**conclude(answers, canary, answer), "asked_by": api, "counted": canary.get("counted", "")}
    except Exception as error:  # its exit code would say that the server is wrong
        found = {"verdict": UNKNOWN, "sentence": f"cannot tell: {_reason(error)}"}
    sentence = found["sentence"]
    said = f"{sentence[0].upper()}{sentence[1:]}.\n{found.get('counted', '')}".rstrip()
    print(json.dumps(found, indent=2) if options.json else said)
    return int(found["verdict"])


if __name__ == "__main__":
    sys.exit(main())
