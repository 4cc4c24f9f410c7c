"""Golden models as declared in cases.yaml."""

import json
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
MIN_MARGIN = 1e-3  # between the two best tokens of a greedy step, so that rounding cannot change a reply
LETTERS = {"F": "full_attention", "w": "sliding_attention", "L": "linear_attention"}
DECLARED = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text())
KINDS = ("dense", "sparse", "named")
SHAPE = DECLARED["shape"]
NAMES = [name for kind in KINDS for name in DECLARED[kind]]
LINEAR = [*DECLARED["linear"]]
LONG_FACTORS = {"short_factor": [1 + i / 64 for i in range(64)], "long_factor": [1 + i * i / 64 for i in range(64)]}


def settings_of(name: str) -> dict[str, Any]:
    """The settings of a case, as a config.json would have them."""
    found = SHAPE | next(DECLARED[kind][name] for kind in (*KINDS, "linear") if name in DECLARED[kind])
    if letters := found.pop("layers", None):
        found["layer_types"] = [LETTERS[letter] for letter in letters]
    return found


def seed_of(name: str) -> int:
    """Its place among the dense and sparse cases, or a sum of its name."""
    first = {"dense": 0, "sparse": 100}
    kind = next(kind for kind in KINDS if name in DECLARED[kind])
    return first[kind] + list(DECLARED[kind]).index(name) if kind in first else zlib.crc32(name.encode())


def rope_settings() -> dict[str, dict[str, Any]]:
    """By name, `rope_parameters`."""
    return {
        name: dict([*list(rope.items())[:3], *LONG_FACTORS.items(), *rope.items()])
        if rope["rope_type"] == "longrope"
        else rope
        for name, rope in DECLARED["rope"].items()
    }


def some(only: Sequence[str], names: Iterable[str]) -> list[str]:
    """Those of the names that --only gives; all without it."""
    if unknown := set(only) - {*names}:
        raise SystemExit(f"--only: there is no '{min(unknown)}'; there are: {', '.join(names)}")
    return [*only] or [*names]


def golden_folders() -> list[str]:
    """Names of the models under tests/golden."""
    return sorted(file.parent.name for file in GOLDEN.glob("*/config.json"))


def merged(file: Path, only: Sequence[str], key: str) -> dict[str, Any]:
    """What a file holds under `key` already, where only some of it is made anew."""
    return json.loads(file.read_text())[key] if only and file.exists() else {}


def eager(folder: Path, **more: Any) -> Any:
    """The model of a folder in transformers: float32, and attention written out. `more` is for `from_pretrained`."""
    import torch
    from transformers import AutoModelForCausalLM

    given = {"dtype": torch.float32, "attn_implementation": "eager"} | more
    return AutoModelForCausalLM.from_pretrained(folder, **given)


def write_cases(file: Path, cases: Iterable[Any], **head: Any) -> None:
    """A line for each case, below what is said of all."""
    lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
    file.write_text(json.dumps(head)[:-1] + f', "cases": [\n{lines}\n]}}\n')


def write_json(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=1) + "\n")
