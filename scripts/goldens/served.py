"""What vLLM's own planner grants a sequence, for random patterns.

vLLM itself is not imported, as it wants a GPU's libraries: two functions of `kv_cache_planning.py` and one of
`kv_cache_interface.py` are taken out of its wheel and run on specifications of layers that have what they read.
"""

import ast
import dataclasses
import logging
import zipfile
from collections import defaultdict

import numpy as np

from scripts.goldens.cases import ROOT, write_cases

OUT = ROOT / "tests" / "checkpoint" / "vllm_groups.json"
CASES = 200


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer's cache as vLLM describes it; layers with equal descriptions may share a group."""

    sliding_window: int | None
    block_size: int
    extra_retained_tokens: int = 0

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
    space = {"defaultdict": defaultdict, "cdiv": lambda a, b: -(-a // b), "logger": logging.getLogger("vllm")}
    space |= {"KVCacheGroupSpec": Group, "KVCacheSpec": Layer}
    exec("from __future__ import annotations\n" + "\n".join(ast.unparse(node) for node in found), space)
    return space


def case(rng: np.random.Generator, plan, blocks_of) -> dict:
    layers, block = int(rng.integers(2, 81)), int(rng.choice([16, 32, 128]))
    window, length = int(rng.integers(1, 5000)), int(rng.integers(1, 200_000))
    in_flight, windowed = int(rng.choice([1, 512, 8192])), rng.random(layers) < rng.random()
    if windowed.all() or not windowed.any():  # which vLLM plans elsewhere
        windowed[0] = not windowed[0]
    groups = plan({f"layer.{i}": Layer(window if w else None, block) for i, w in enumerate(windowed)})
    blocks = sum(
        -(-length // block)
        if group.kv_cache_spec.sliding_window is None
        else blocks_of(group.kv_cache_spec, in_flight, length)
        for group in groups
    )
    size = max(len(group.layer_names) for group in groups)
    counts = {"full": int((~windowed).sum()), "windowed": int(windowed.sum()), "window": window, "length": length}
    counts |= {"block": block, "in_flight": in_flight, "groups": len(groups), "layers_of_a_group": size}
    return counts | {"entries": size * block * blocks}


def write_served(given) -> None:
    with zipfile.ZipFile(given.wheel) as archive:
        files = ("core/kv_cache_planning", "kv_cache_interface")
        planning, interface = (archive.read(f"vllm/v1/{name}.py").decode() for name in files)
    plan = functions_of(planning, "_get_kv_cache_groups_uniform_page_size", "create_kv_cache_group_specs")
    window_class = next(n for n in ast.parse(interface).body if getattr(n, "name", "") == "SlidingWindowSpec")
    blocks_of = functions_of(ast.unparse(window_class), "max_admission_blocks_per_request")
    logging.disable()
    rng = np.random.default_rng(0)
    functions = (plan["_get_kv_cache_groups_uniform_page_size"], blocks_of["max_admission_blocks_per_request"])
    write_cases(OUT, [case(rng, *functions) for _ in range(CASES)], source=given.wheel.name)
