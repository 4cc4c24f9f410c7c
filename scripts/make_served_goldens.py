"""Makes tests/checkpoint/vllm_groups.json: what vLLM's own planner grants a sequence, for random patterns.

    python scripts/make_served_goldens.py vllm-0.33.0-*.whl

vLLM itself is not imported, as it wants a GPU's libraries: two functions of `kv_cache_planning.py` and one of
`kv_cache_interface.py` are taken out of its wheel and run on specifications of layers that have what they read.
"""

import ast
import dataclasses
import json
import logging
import sys
import zipfile
from collections import defaultdict
from pathlib import Path

import numpy as np

OUT = Path(__file__).parents[1] / "tests" / "checkpoint" / "vllm_groups.json"
CASES = 200


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer's cache as vLLM describes it; layers with equal descriptions may share a group."""

    window: int | None
    block_size: int
    extra_retained_tokens: int = 0

    @property
    def sliding_window(self) -> int | None:
        return self.window

    @classmethod
    def merge(cls, layers):
        assert len(set(layers)) == 1
        return layers[0]


@dataclasses.dataclass
class Group:
    layer_names: list
    kv_cache_spec: Layer


def functions_of(source: str, *names: str) -> dict:
    """The named functions or methods of a module, defined apart from the rest of it."""
    found = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", None) in names]
    for node in found:
        node.decorator_list, node.returns = [], None
        for argument in node.args.args:
            argument.annotation = None
    space = {
        "defaultdict": defaultdict,
        "cdiv": lambda a, b: -(-a // b),
        "logger": logging.getLogger("vllm"),
        "KVCacheGroupSpec": Group,
        "KVCacheSpec": Layer,
    }
    code = "from __future__ import annotations\n" + "\n".join(ast.unparse(node) for node in found)
    exec(code, space)
    return space


def main() -> None:
    (wheel,) = sys.argv[1:]
    with zipfile.ZipFile(wheel) as archive:
        planning, interface = (
            archive.read(f"vllm/v1/{name}.py").decode() for name in ("core/kv_cache_planning", "kv_cache_interface")
        )
    plan = functions_of(planning, "_get_kv_cache_groups_uniform_page_size", "create_kv_cache_group_specs")
    window_class = next(
        node
        for node in ast.parse(interface).body
        if isinstance(node, ast.ClassDef) and node.name == "SlidingWindowSpec"
    )
    blocks_of = functions_of(ast.unparse(window_class), "max_admission_blocks_per_request")
    logging.disable()
    rng, cases = np.random.default_rng(0), []
    for _ in range(CASES):
        layers, block = int(rng.integers(2, 81)), int(rng.choice([16, 32, 128]))
        window, length = int(rng.integers(1, 5000)), int(rng.integers(1, 200_000))
        in_flight, windowed = int(rng.choice([1, 512, 8192])), rng.random(layers) < rng.random()
        if windowed.all() or not windowed.any():  # which vLLM plans elsewhere
            windowed[0] = not windowed[0]
        specs = {f"layer.{i}": Layer(window if w else None, block) for i, w in enumerate(windowed)}
        groups = plan["_get_kv_cache_groups_uniform_page_size"](specs)
        blocks = sum(
            -(-length // block)
            if group.kv_cache_spec.window is None
            else blocks_of["max_admission_blocks_per_request"](group.kv_cache_spec, in_flight, length)
            for group in groups
        )
        size = max(len(group.layer_names) for group in groups)
        cases.append(
            {
                "full": int((~windowed).sum()),
                "windowed": int(windowed.sum()),
                "window": window,
                "length": length,
                "block": block,
                "in_flight": in_flight,
                "groups": len(groups),
                "layers_of_a_group": size,
                "entries": size * block * blocks,
            }
        )
    text = ",\n".join(json.dumps(case) for case in cases)
    OUT.write_text(f'{{"source": "{Path(wheel).name}", "cases": [\n{text}\n]}}\n')


if __name__ == "__main__":
    main()
