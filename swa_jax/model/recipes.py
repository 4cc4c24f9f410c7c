"""Named patterns, as `NAME[-1-in-N][@OFFSET][+fa-decode][+last-tokens=N][+sink-tokens=K][+nope]`.

| recipe | full attention in |
|---|---|
| `full` | every layer |
| `window` | no layer (naive sliding window) |
| `streaming` | no layer; the first tokens stay visible (window + sink tokens) |
| `interleave-1-in-4`, `interleave-1-in-4@1` | one layer in n, at offset n-1 unless told (SWAA 3.1.2) |
| `static-hybrid-1:3` | one full after three windowed layers (SwiAttn's StaticHybrid: 3, 7, 11, 15, 19 of 22) |
| `begin-middle-end-1-in-4` | thirds of the budget at the start, the middle and the end (BOSCH's BME) |
| `random-1-in-4` | drawn with `seed` |
| `layers:2,5` | the layers named |
| `switch` | routed in every layer (SwiAttn) |
| `swaa-…` | SWAA's Table 2, see `SWAA_ROWS` |
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import nearest
from swa_jax.model.layer_types import FULL, SWITCH, WINDOW
from swa_jax.model.window import Window

DEFAULT_WINDOW = 2048  # SWAA's and NLL-guided selection's
DEFAULT_SINK_TOKENS = 10  # likewise

# SWAA Table 2 (its marks are lost in our copy; read from the text). The value is the recipe it stands for.
SWAA_ROWS = {
    "swaa-no-training": "interleave-1-in-2+fa-decode+sink-tokens",
    "swaa-no-training-thinking-efficiency": "window+fa-decode+sink-tokens",
    "swaa-no-training-thinking-quality": "interleave-1-in-2+fa-decode+sink-tokens",
    "swaa-trained-efficiency": "window+fa-decode",
    "swaa-trained-efficiency-interleave": "interleave-1-in-2",
    "swaa-trained-quality": "interleave-1-in-2+fa-decode",
}
# Chosen for models that people use, by name: `docs/findings.md` says how.
PUBLISHED = {file.stem: file for file in sorted((Path(__file__).parents[1] / "patterns").glob("*.json"))}
BASES = ("full", "window", "streaming", "switch", "interleave", "static-hybrid", "begin-middle-end", "random", "layers")


class Recipe(NamedTuple):
    """What a recipe says of a model of known depth."""

    full_layers: list[int]
    rest: str  # the type of the other layers
    window: Window
    drawn: bool  # with a seed
    nope: bool  # full layers without rotary embeddings


def read_recipe(recipe: str, layers: Sequence[int], seed: int) -> Recipe:
    """Parse a recipe's name, for a model of which these layers attend. Raises `ConfigError` for an unknown one."""
    first, _, more = recipe.partition("+")
    name, *suffixes = "+".join(part for part in (SWAA_ROWS.get(first, first), more) if part).split("+")
    decode, nope, last_tokens, sink_tokens = False, False, 0, DEFAULT_SINK_TOKENS if name == "streaming" else 0
    for suffix in suffixes:
        if suffix == "fa-decode":
            decode = True
        elif suffix == "nope":
            nope = True
        elif match := re.fullmatch(r"last-tokens=(\d+)", suffix):
            last_tokens = int(match[1])
        elif match := re.fullmatch(r"sink-tokens(?:=(\d+))?", suffix):
            sink_tokens = int(match[1] or DEFAULT_SINK_TOKENS)
        else:
            known = "+fa-decode, +last-tokens=N, +sink-tokens=K, +nope"
            raise ConfigError(f"recipe '{recipe}': unknown suffix '+{suffix}'; known: {known}")
    full, rest = _full_layers(recipe, name, layers, seed)
    size = DEFAULT_WINDOW if len(full) < len(layers) else None
    return Recipe(full, rest, Window(size, sink_tokens, decode, last_tokens), name.startswith("random"), nope)


def _full_layers(recipe: str, name: str, layers: Sequence[int], seed: int) -> tuple[list[int], str]:
    """The full layers and the type of the others."""
    everything, num_layers = list(layers), len(layers)
    if name == "full":
        return everything, FULL
    if name in ("window", "streaming"):
        return [], WINDOW
    if name == "switch":
        return [], SWITCH
    if match := re.fullmatch(r"layers:(\d+(?:,\d+)*)", name):
        return [int(i) for i in match[1].split(",")], WINDOW
    if match := re.fullmatch(r"static-hybrid-1:(\d+)", name):
        return _every(recipe, everything, int(match[1]), int(match[1]) + 1), WINDOW
    if match := re.fullmatch(r"(interleave|begin-middle-end|random)-1-in-(\d+)(?:@(\d+))?", name):
        kind, n = match[1], int(match[2])
        if n < 1:
            raise ConfigError(f"recipe '{recipe}': one layer in {n} is none; n must be at least 1")
        if match[3] and (kind != "interleave" or int(match[3]) >= n):
            raise ConfigError(f"recipe '{recipe}': the offset after @ must be below n, and is for interleave only")
        if kind == "interleave":
            return _every(recipe, everything, int(match[3]) if match[3] else n - 1, n), WINDOW
        budget = max(1, num_layers // n)  # as many as interleaving keeps
        if kind == "random":
            return sorted(np.random.default_rng(seed).choice(everything, budget, replace=False).tolist()), WINDOW
        return [everything[i] for i in begin_middle_end(budget, num_layers)], WINDOW
    if name in PUBLISHED:
        raise ConfigError(
            f"'{recipe}': {name} is a published pattern, no recipe: name it alone, and change its window by options "
            "such as --fa-decode"
        )
    base = re.split(r"-1-in-|-1:|:", name)[0]
    if base in BASES:
        raise ConfigError(f"recipe '{recipe}' is incomplete: write it as in '{_example(base)}'")
    known = [*map(_example, BASES), *SWAA_ROWS, *PUBLISHED]
    raise ConfigError(f"'{recipe:.100}' is neither a recipe nor a .json file{nearest(name, known)}")


def _every(recipe: str, layers: list[int], first: int, step: int) -> list[int]:
    if first >= len(layers):
        raise ConfigError(
            f"recipe '{recipe}' leaves none of {len(layers)} layers full: name it 'window', or lower its N"
        )
    return layers[first::step]


def _example(base: str) -> str:
    """A recipe with this base."""
    if base in ("full", "window", "streaming", "switch"):
        return base
    return {"static-hybrid": "static-hybrid-1:3", "layers": "layers:2,5"}.get(base, f"{base}-1-in-4")


def begin_middle_end(budget: int, num_layers: int) -> list[int]:
    """`budget` layers in three runs: at the start, round the middle, at the end (extras go start first)."""
    begin, middle, end = (budget // 3 + (i < budget % 3) for i in range(3))
    start = (num_layers - middle) // 2
    chosen = [*range(begin), *range(start, start + middle), *range(num_layers - end, num_layers)]
    # Near a full budget the runs touch: fill up with the first layers not chosen yet.
    spare = [i for i in range(num_layers) if i not in chosen]
    return sorted({*chosen, *spare[: budget - len(set(chosen))]})
