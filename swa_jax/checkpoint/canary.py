"""The receipt of an export: probes whose answers tell what a server computes (`canary.json`), and who asks them.

A probe is a list of token ids. It is chosen, among random, repetitive and drawn texts, so that the readings of the
model (`readings`) differ in the log-probabilities of its tokens. The file has these for every reading, and those of
what the model generates after a few prompts (`answers`). All are computed with our own decoder in f32.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import write_json
from swa_jax.checkpoint import check_server
from swa_jax.checkpoint.answers import TURN, answer_readings, answers, positions_computed, prompt_length
from swa_jax.checkpoint.folder import load_model, open_checkpoint
from swa_jax.checkpoint.readings import GUESSED_WINDOW, Reading, readings_of
from swa_jax.checkpoint.teacher_forced import Forward, Texts, TokenScores
from swa_jax.data.haystack import NEEDLE, draw_keys, draw_value
from swa_jax.data.tokenizer import Tokenizer, load_tokenizer
from swa_jax.model.config import ModelConfig
from swa_jax.model.flops import matrix_parameters
from swa_jax.model.memory import free_memory
from swa_jax.model.parameters import parameters
from swa_jax.model.pattern import AttentionPattern

SCRIPT = Path(check_server.__file__)
# Operations that a canary may cost: some minutes on a CPU, and on an accelerator.
BUDGET = {"cpu": 6e13}
ACCELERATOR_BUDGET = 5e15
POSITIONS, CONTROLS, GRID = 48, 8, 96  # of a probe: in the file, before attention matters, and tried
TOP_PROMPTS = 2  # beginnings of a probe whose likeliest next tokens are kept, beside the whole
# Probes, the texts that each is chosen from, and the windows that they are long.
SIZES = ((8, 3, 4.0), (8, 3, 2.5), (4, 2, 2.5), (2, 1, 2.0), (2, 1, 1.25))
SHORTEST = 64


class Size(NamedTuple):
    """How many probes, the texts that they are chosen from, their tokens, and whether only the readings that matter
    most are computed."""

    probes: int
    candidates: int
    length: int
    first_only: bool
    prompt: int | None = None  # tokens of the prompts that are answered; None: there is no room for answers

    @property
    def prompts(self) -> int:
        """Texts that the prompts are chosen from."""
        return 0 if self.prompt is None else max(1, self.probes // 2)

    def tried(self, readings: Sequence[Reading]) -> list[Reading]:
        """The readings that candidates are chosen by."""
        if self.candidates <= self.probes:
            return []
        return [reading for reading in readings if reading.first and not reading.padding_seen]

    def computed(self, readings: Sequence[Reading]) -> list[Reading]:
        """Those whose answers are kept."""
        return [reading for reading in readings if reading.first or not self.first_only]

    def rows(self, readings: Sequence[Reading]) -> int:
        """Probes that go through the model in all; the right reading once more in bfloat16."""
        return self.candidates * len(self.tried(readings)) + self.probes * (len(self.computed(readings)) + 1)

    def operations(self, config: ModelConfig, readings: Sequence[Reading]) -> float:
        """What the canary costs."""
        tokens = self.length * self.rows(readings)
        if self.prompt is not None:
            tokens += positions_computed(readings[0].pattern, self.prompts, self.prompt)
        return 2.0 * matrix_parameters(config) * tokens


def write_canary(
    folder: Path,
    checkpoint: Path,
    pattern: AttentionPattern,
    hf: Mapping[str, Any],
    budget: float | None = None,
    memory: float | None = None,
    longest: int | None = None,
    counted: str = "",
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> str:
    """Write `canary.json` and `check_server.py` into an export.

    Args:
      folder: the export.
      checkpoint: the checkpoint folder that it is made from.
      pattern: what the export says.
      hf: the export's `config.json`.
      budget: operations that it may cost; None: `BUDGET`.
      memory: bytes that it may take; None: what this machine has free.
      longest: tokens that the server takes of a prompt and its answer; None: as many as the model.
      counted: what the server's cache takes, in a sentence, which `check_server.py` repeats.
      progress: called with (passes done, passes in all).

    Returns:
      What a user should know, in a few sentences: how well readings can be told apart, or why there is no canary.
    """
    config = open_checkpoint(checkpoint).config
    readings = readings_of(config, pattern, hf)
    wanted = 1.6 * 4 * sum(parameter.size for parameter in parameters(config))
    free = free_memory() if memory is None else memory
    if wanted > free:
        return f"No canary: its computation takes {wanted / 1e9:.0f} GB of memory, and {free / 1e9:.0f} GB are free."
    allowed = budget or BUDGET.get(jax.default_backend(), ACCELERATOR_BUDGET)
    size = choose_size(config, pattern, readings, allowed, longest)
    if size is None:
        return (
            f"No canary: with probes longer than the window it takes more than {allowed:.0e} operations. "
            "Export on an accelerator to have one."
        )
    try:
        canary = make_canary(checkpoint, pattern, hf, readings, size, progress) | {"counted": counted}
    except jax.errors.JaxRuntimeError as error:  # such as memory that ran out after all
        return f"No canary: it could not be computed ({str(error).splitlines()[0][:200]})."
    write_json(folder / check_server.CANARY_FILE, canary, indent=0)
    shutil.copyfile(SCRIPT, folder / SCRIPT.name)
    return summary(canary)


def choose_size(
    config: ModelConfig,
    pattern: AttentionPattern,
    readings: Sequence[Reading],
    budget: float,
    longest: int | None = None,
) -> Size | None:
    """The largest canary within the budget of operations, for prompts of at most `longest` tokens; None if there is
    none."""
    window = _window(pattern)
    room = min(config.max_position_embeddings, longest or config.max_position_embeddings)
    room -= 2  # for a token in front, and one that is generated
    shortest = window + 2
    if (after := config.long_rope_after) is not None and after >= 2 * window:
        room = min(room, after - 1)  # every text has LongRoPE's short factors
    elif after is not None and room > after:
        shortest = max(shortest, after + 1)
    for answered, first_only in ((True, False), (True, True), (False, True)):
        for probes, texts, windows in SIZES:
            length = min(max(int(windows * window), SHORTEST), room)
            prompt = prompt_length(pattern, shortest, min(length, 2 * window), room) if answered else None
            size = Size(probes, texts * probes, length, first_only, prompt)
            if length >= 2 and size.operations(config, readings) <= budget:
                return size
    return None


def make_canary(
    checkpoint: Path,
    pattern: AttentionPattern,
    hf: Mapping[str, Any],
    readings: list[Reading],
    size: Size,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """The canary as a JSON value."""
    model = load_model(checkpoint, dtype=jnp.float32)
    generated = answer_readings(pattern, readings[0].sentence)
    total, done = size.rows(readings) + size.prompts * (len(generated) + 1), 0

    def advance(texts: int = size.probes) -> None:
        nonlocal done
        done += texts
        progress(done, total)

    readings = size.computed(readings)
    kinds = {kind for reading in readings for kind in reading.pattern.layer_types}
    forward = Forward(model, kinds, check_server.TOP, advance)
    rng = np.random.default_rng(0)
    window = _window(pattern)
    tokenizer = _tokenizer(checkpoint)
    front = hf.get("bos_token_id")
    front = front if isinstance(front, int) and 0 <= front < model.config.vocab_size else 0
    plain = _plain_tokens(hf, model.config, tokenizer)
    candidates = _candidates(rng, size.candidates, size.length, window, plain, tokenizer)
    chosen = _choose(forward, readings, candidates, size, window, front)
    texts = Texts(chosen, [_grid(len(text), window) for text in chosen], front)
    scores = [forward(reading, texts) for reading in readings]
    rounded = forward(readings[0], texts, jnp.bfloat16)
    canary = _as_json(texts, readings, scores, rounded, pattern, window)
    if size.prompt is not None:
        prompts = _candidates(rng, size.prompts, size.prompt + TURN, window, plain, tokenizer)
        canary["answers"] = answers(model, generated, prompts, plain, lambda: advance(size.prompts))
    return _tell_apart(canary)


# ---- choosing probes ----


def _window(pattern: AttentionPattern) -> int:
    return pattern.sliding_window or GUESSED_WINDOW


def _tokenizer(checkpoint: Path) -> Tokenizer | None:
    try:
        return load_tokenizer(checkpoint)
    except ConfigError:  # none, or one that cannot be read: token ids need none
        return None


def _plain_tokens(hf: Mapping[str, Any], config: ModelConfig, tokenizer: Tokenizer | None) -> np.ndarray:
    """The ids of tokens that are not special."""
    size, special = config.vocab_size, set()
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = hf.get(key)
        special |= set(value if isinstance(value, list) else [value])
    if tokenizer is not None:
        size = min(size, tokenizer.vocab_size)
        special |= set(tokenizer.backend.get_added_tokens_decoder())
    return np.array([token for token in range(size) if token not in special])


def _candidates(
    rng: np.random.Generator, count: int, length: int, window: int, ids: np.ndarray, tokenizer: Tokenizer | None
) -> list[list[int]]:
    """Texts of one length: random ones, ones that repeat themselves about a window later, ones of few tokens, and,
    where there is a tokenizer, keys and numbers that come again."""
    texts: list[list[int]] = []
    while len(texts) < count:
        kind = len(texts) % (4 if tokenizer is not None else 3)
        if kind == 0:
            text = rng.choice(ids, length)
        elif kind == 1:
            period = max(2, int(rng.choice([window // 2, window - 1, window, window + 1, 2 * window])))
            text = np.resize(rng.choice(ids, period), length)
        elif kind == 2:
            text = rng.choice(rng.choice(ids, min(8, len(ids))), length)
        else:
            assert tokenizer is not None
            text = np.array(_facts(rng, tokenizer, length))
        texts.append(text.tolist())
    return texts


def _facts(rng: np.random.Generator, tokenizer: Tokenizer, length: int) -> list[int]:
    """Sentences that give names a number, each of them several times."""
    facts = [NEEDLE.format(key=key, value=draw_value(rng)) for key in draw_keys(rng, max(2, length // 64))]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += tokenizer.encode(str(rng.choice(facts)))
    return tokens[:length]


def _choose(
    forward: Forward, readings: list[Reading], candidates: list[list[int]], size: Size, window: int, front: int
) -> list[list[int]]:
    """The candidates that separate best where they separate worst, cut to unequal lengths."""
    score = np.zeros(len(candidates))
    tried = size.tried(readings)
    if len(tried) > 1:
        # In groups of as many as are chosen, so that what is compiled serves for those as well.
        groups = [candidates[i : i + size.probes] for i in range(0, len(candidates), size.probes)]
        texts = [Texts(group, [_grid(len(text), window) for text in group], front) for group in groups]
        scores = [
            np.concatenate([np.stack(forward(reading, group).log_probs) for group in texts]) for reading in tried
        ]  # [C, Q] each
        apart = np.stack([np.abs(a - scores[0]).mean(axis=1) for a in scores[1:]])  # [R, C]
        score = (apart / np.maximum(apart.max(axis=1, keepdims=True), 1e-9)).min(axis=0)
    best = np.argsort(-score, kind="stable")[: size.probes]
    after = forward.config.long_rope_after
    shortest = max(size.length // 2, min(size.length - 1, window + window // 8 + 2))
    if after is not None and size.length > after:
        shortest = max(shortest, after + 1)
    lengths = np.linspace(size.length, shortest, size.probes).round().astype(int)
    return [candidates[c][:length] for c, length in zip(best, lengths, strict=True)]


def _grid(length: int, window: int) -> list[int]:
    """Positions to ask from: a few of the first half of a window, where nothing differs, many behind, and the last."""
    early = max(1, min(window // 2, length - 2))
    controls = np.linspace(0, early - 1, min(CONTROLS, early)).round().astype(int)
    late = np.linspace(early, length - 2, min(GRID, length - 1 - early)).round().astype(int)
    return sorted({*controls.tolist(), *late.tolist(), length - 1})


# ---- the file ----


def _as_json(
    texts: Texts,
    readings: list[Reading],
    scores: list[TokenScores],
    rounded: TokenScores,
    pattern: AttentionPattern,
    window: int,
) -> dict[str, Any]:
    places, prompts = _places(texts, scores, window)
    canary: dict[str, Any] = {
        "format": check_server.FORMAT,
        "about": "what this model answers, and would answer if it were read wrongly; see check_server.py",
        "pattern": {"layer_types": list(pattern.layer_types), "sliding_window": pattern.sliding_window},
        "probes": [
            {
                "tokens": text,
                "positions": [asked[q] for q in chosen],
                "control": sum(asked[q] < max(1, window // 2) for q in chosen),
            }
            for text, asked, chosen in zip(texts.tokens, texts.queries, places, strict=True)
        ],
        "top": [
            {"probe": p, "length": texts.queries[p][q] + 1, "control": texts.queries[p][q] < max(1, window // 2)}
            for p, q in prompts
        ],
    }

    def values(answer: TokenScores) -> dict[str, Any]:
        return {
            "log_probs": [_short(row[chosen]) for row, chosen in zip(answer.log_probs, places, strict=True)],
            "top": [_short(answer.top[p][q]) for p, q in prompts],
        }

    canary["bfloat16"] = values(rounded)
    canary["readings"] = [
        {"name": reading.name, "sentence": reading.sentence, "batch_only": reading.padding_seen, **values(answer)}
        for reading, answer in zip(readings, scores, strict=True)
        if reading is readings[0] or reading.pattern != pattern or _differs(answer, scores[0])
    ]
    return canary


def _differs(answer: TokenScores, right: TokenScores) -> bool:
    """Whether a reading makes any difference: biases that are 0 can be left out."""
    return any(np.abs(a - b).max() > 1e-4 for a, b in zip(answer.log_probs, right.log_probs, strict=True))


def _short(row: np.ndarray) -> list[float]:
    return [round(float(x), 5) for x in row]


def _places(texts: Texts, scores: list[TokenScores], window: int) -> tuple[list[list[int]], list[tuple[int, int]]]:
    """Which of the tried positions go into the file, by text, and of which (text, position) the likeliest tokens do.

    Those in the first half of a window, and those where readings differ most, each reading counting alike.
    """
    places, wholes, beginnings = [], [], []
    for p, asked in enumerate(texts.queries):
        right = scores[0].log_probs[p][:-1]  # the last position has no next token
        apart = np.stack([np.abs(a.log_probs[p][:-1] - right) for a in scores[1:]] or [np.zeros(len(right))])
        score = (apart / np.maximum(apart.mean(axis=1, keepdims=True), 1e-6)).clip(max=5).mean(axis=0)
        control = np.array(asked[:-1]) < max(1, window // 2)
        score[control] = np.inf
        best = np.argsort(-score, kind="stable")
        places.append(sorted(best[:POSITIONS].tolist()))
        late = [q for q in best.tolist() if not control[q]]
        wholes.append((p, len(asked) - 1))
        beginnings += [(p, q) for q in [*late[:TOP_PROMPTS], int(np.flatnonzero(control)[-1])]]
    return places, wholes + beginnings


def _tell_apart(canary: dict[str, Any]) -> dict[str, Any]:
    """The canary, which then says of each reading how far it is from the right one, and in which precision a server can
    be told to do it."""
    case = check_server.prompt_case(canary, "log_probs", batch=True)
    canary["rounding"] = {"bfloat16": round(float(case.rounding.mean()), 6)}
    _say_apart(case, canary["readings"], np.ones_like(case.control))
    if "answers" in canary:
        case = check_server.answer_case(check_server.prompt_case(canary, "log_probs"), canary["answers"])
        _say_apart(case, canary["answers"]["readings"], ~case.control)
    return canary


def _say_apart(case: check_server.Case, readings: list[dict[str, Any]], counted: np.ndarray) -> None:
    """`counted` [N] bool: the values that the differences are of."""
    noise = case.rounded - case.expected[0]
    for reading, expected in zip(readings, case.expected, strict=True):
        reading["difference"] = round(float(np.abs(expected - case.expected[0])[counted].mean()), 6)
        told = [
            dtype
            for dtype, observed in (("bfloat16", expected + noise), ("float32", expected))
            if case.evidence(observed)[1][0] >= check_server.EVIDENCE
        ]
        reading["told_apart"] = told[0] if told else "no"


def summary(canary: Mapping[str, Any]) -> str:
    """What the canary can tell apart, in a few sentences."""
    said = canary.get("answers", {"readings": [], "questions": []})
    wrong, probes = canary["readings"][1:] + said["readings"][1:], canary["probes"]
    rounding = canary["rounding"]["bfloat16"]
    told = [reading for reading in wrong if reading["told_apart"] == "bfloat16"]
    longest, questions = len(probes[0]["tokens"]), len(said["questions"])
    lines = [
        f"{check_server.CANARY_FILE} has the log-probabilities that this model gives to {len(probes)} texts of up to "
        f"{longest} tokens, and {questions} of its answers. {SCRIPT.name} compares a server with them."
    ]
    if told:
        nearest = min(told, key=lambda reading: reading["difference"])
        lines.append(
            f"Together they show {len(told)} mistakes that servers make. The hardest to see "
            f"({nearest['sentence']}) changes a value by {nearest['difference']:.2g} on average; rounding to bfloat16 "
            f"changes it by {rounding:.2g}."
        )
    for dtype, words in (
        ("float32", "These mistakes are seen only on a server that computes in float32"),
        ("no", "These mistakes change this model too little to be seen"),
    ):
        alike = [reading["sentence"] for reading in wrong if reading["told_apart"] == dtype]
        if alike:
            lines.append(f"{words}: {'; '.join(alike)}.")
    return " ".join(lines)
