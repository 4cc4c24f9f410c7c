"""The selection methods: one table for `swa-jax select`, `swa-jax compare` and docs/selection.md.

It imports nothing heavy, so that the command line can read it for `--help`. `swa_jax.select.methods.choose` runs a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Family = Literal["nll", "nll-heads", "light-transfer", "bosch", "static", "gates", "heuristic"]
Variant = Literal["bosch", "swaps", "single", "multi", "layer"]
StaticMethod = Literal["dcam", "apl", "proxy", "qada", "razor", "fisher", "fisher-text", "kl", "kl-layers"]
By = Literal["answers", "loss"]  # what masks are scored by: answers that are right, or the answers' loss
Heuristic = Literal["random", "random-heads", "begin-middle-end", "interleave"]


class Method(NamedTuple):
    """One way of choosing which layers or KV heads keep full attention."""

    name: str  # everywhere: of the command, of `compare --method`, in results and in `provenance`
    family: Family  # the function that runs it, and the options that its command has
    options: Mapping[str, Any]  # what makes this method of its family
    chooses: Literal["layers", "KV heads", "layers or KV heads"]
    by: str
    costs: str


TRIED = 4  # layers, or heads, that are scored in a round of a search that a gradient leads
_PASSES, _SEARCH = "one pass with whole attention rows", "hundreds to thousands of passes"
_ROWS = (
    Method("nll", "nll", {}, "layers",
           "what making one layer full, all others windowed, does for the answers", "(layers + 3) / 2 passes"),
    Method("nll-greedy", "nll", {"greedy": True, "tried": 0}, "layers",
           "the score of `nll`, taken again after each layer chosen", "at most that for each layer chosen"),
    Method("nll-gradient", "nll", {"greedy": True, "tried": TRIED}, "layers",
           "the same, but of the four layers only that one gradient names", "6 to 8 passes for each layer chosen"),
    Method("nll-heads", "nll-heads", {}, "KV heads",
           "as `nll-gradient`, of single heads, in at most 16 rounds", "8 passes or more a round"),
    Method("light-transfer", "light-transfer", {}, "layers",
           "how much the last queries look at near keys anyway", "one pass"),
    Method("bosch", "bosch", {"variant": "bosch"}, "KV heads",
           "a search over which heads are windowed, scored by answers that are right", _SEARCH),
    Method("bosch-swaps", "bosch", {"variant": "swaps"}, "KV heads",
           "BOSCH, then swaps over the heads of all layers", _SEARCH),
    Method("bosch-single", "bosch", {"variant": "single"}, "KV heads",
           "BOSCH's first stage alone: one layer at a time, each at the same ratio", _SEARCH),
    Method("bosch-multi", "bosch", {"variant": "multi"}, "KV heads",
           "BOSCH's first stage over groups of four layers", _SEARCH),
    Method("bosch-layer", "bosch", {"variant": "layer"}, "layers",
           "BOSCH's search over whole layers", _SEARCH),
    Method("dcam", "static", {"method": "dcam"}, "KV heads", "attention inside the window", _PASSES),
    Method("apl", "static", {"method": "apl"}, "KV heads", "how far back the last token looks most", _PASSES),
    Method("proxy", "static", {"method": "proxy"}, "KV heads", "how few blocks of keys a head needs", _PASSES),
    Method("qada", "static", {"method": "qada"}, "KV heads",
           "attention inside the window, that outside estimated", _PASSES),
    Method("razor", "static", {"method": "razor"}, "KV heads",
           "how much a head looks back to earlier occurrences of a token, in random text", "one pass"),
    Method("fisher", "static", {"method": "fisher"}, "KV heads",
           "whether the answers depend on attention outside the window", "one pass and its gradient"),
    Method("fisher-text", "static", {"method": "fisher-text"}, "KV heads",
           "as `fisher`, of all tokens in place of the answers'", "one pass and its gradient"),
    Method("kl", "static", {"method": "kl"}, "KV heads",
           "how far windowing one head alone moves the full model's predictions", "a pass for each head"),
    Method("kl-layers", "static", {"method": "kl-layers"}, "layers",
           "how far windowing one layer alone moves the full model's predictions", "a pass for each layer"),
    Method("gates", "gates", {}, "KV heads",
           "gates between full and window attention, learned by the answers' loss", "200 steps of training"),
    Method("random", "heuristic", {"kind": "random"}, "layers", "chance", "nothing"),
    Method("random-heads", "heuristic", {"kind": "random-heads"}, "KV heads", "chance", "nothing"),
    Method("begin-middle-end", "heuristic", {"kind": "begin-middle-end"}, "layers",
           "place: at the start, in the middle and at the end", "nothing"),
    Method("interleave", "heuristic", {"kind": "interleave"}, "layers", "place: at equal distances", "nothing"),
)  # fmt: skip
METHODS: dict[str, Method] = {method.name: method for method in _ROWS}


def methods_table() -> str:
    """The table as Markdown, for docs/selection.md."""
    rows = [f"| `{m.name}` | {m.chooses} | {m.by} | {m.costs} |" for m in _ROWS]
    return "\n".join(["| method | chooses | by | costs |", "|---|---|---|---|", *rows]) + "\n"
