"""What vLLM's own planner grants a sequence, for random patterns, on devices with vLLM's own defaults.

vLLM itself is not imported, as it wants a GPU's libraries: a few functions of its planner, of its settings and of its
command line are taken out of its wheel and run on objects that have what they read.
"""

import ast
import dataclasses
import logging
import sys
import zipfile
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np

from scripts.goldens.cases import ROOT, write_cases

OUT = ROOT / "tests" / "checkpoint" / "vllm_groups.json"
CASES = 200
DEVICES = {  # GiB of memory, and the name by which the driver calls it
    "h100": (80, "NVIDIA H100 80GB HBM3"),
    "h200": (140, "NVIDIA H200"),
    "a100": (80, "NVIDIA A100-SXM4-80GB"),
    "gb10": (119, "NVIDIA GB10"),
    "l4": (22, "NVIDIA L4"),
    "l40s": (45, "NVIDIA L40S"),
    "b200": (179, "NVIDIA B200"),
    "mi300x": (192, "AMD Instinct MI300X"),
    "cpu": (0, "cpu"),
}


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


def functions_of(source: str, *names: str, **known: Any) -> dict:
    """The named functions or methods of a module, defined apart from the rest of it, with what else they read."""
    found = [node for node in ast.walk(ast.parse(source)) if getattr(node, "name", None) in names]
    for node in found:
        node.decorator_list, node.returns = [], None
        for argument in node.args.args:
            argument.annotation = None
    space = {"defaultdict": defaultdict, "cdiv": lambda a, b: -(-a // b), "logger": logging.getLogger("vllm")}
    space |= {"KVCacheGroupSpec": Group, "KVCacheSpec": Layer} | known
    exec("from __future__ import annotations\n" + "\n".join(ast.unparse(node) for node in found), space)
    return space


def in_flight_of(device: str, defaults: str, settings: str) -> tuple[int, int]:
    """Prompt tokens that `vllm serve` computes at once on a device, and those of all batches in flight."""
    gigabytes, name = DEVICES[device]
    platform = SimpleNamespace(
        get_device_total_memory=lambda: gigabytes * 2**30,
        get_device_name=lambda: name,
        is_device_capability=lambda version: device == "gb10",
        is_tpu=lambda: False,
        is_cpu=lambda: device == "cpu",
    )
    usage = SimpleNamespace(LLM_CLASS="class", OPENAI_API_SERVER="server")
    sys.modules |= {n: SimpleNamespace(UsageContext=usage) for n in ("vllm", "vllm.usage", "vllm.usage.usage_lib")}
    found = functions_of(defaults, "get_batch_defaults", current_platform=platform, GiB_bytes=2**30)
    batched = found["get_batch_defaults"](None, 1)[0]["server"]
    scheduler = SimpleNamespace(async_scheduling=device != "cpu", max_num_batched_tokens=batched)
    config = SimpleNamespace(
        scheduler_config=scheduler, parallel_config=SimpleNamespace(pipeline_parallel_size=1), use_v2_model_runner=False
    )
    found = functions_of(settings, "max_concurrent_batches", "max_in_flight_tokens")
    config.max_concurrent_batches = found["max_concurrent_batches"](config)
    return batched, found["max_in_flight_tokens"](config)


def case(rng: np.random.Generator, devices: dict, plan, blocks_of) -> dict:
    layers, block = int(rng.integers(2, 81)), int(rng.choice([16, 32, 128]))
    window, length = int(rng.integers(1, 5000)), int(rng.integers(1, 200_000))
    device, windowed = str(rng.choice(list(devices))), rng.random(layers) < rng.random()
    batched, in_flight = devices[device]
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
    counts |= {"block": block, "device": device, "batched": batched, "in_flight": in_flight}
    return counts | {"groups": len(groups), "layers_of_a_group": size, "entries": size * block * blocks}


def write_served(given) -> None:
    with zipfile.ZipFile(given.wheel) as archive:
        files = ("v1/core/kv_cache_planning", "v1/kv_cache_interface", "engine/arg_utils", "config/vllm")
        planning, interface, defaults, settings = (archive.read(f"vllm/{name}.py").decode() for name in files)
    plan = functions_of(planning, "_get_kv_cache_groups_uniform_page_size", "create_kv_cache_group_specs")
    window_class = next(n for n in ast.parse(interface).body if getattr(n, "name", "") == "SlidingWindowSpec")
    blocks_of = functions_of(ast.unparse(window_class), "max_admission_blocks_per_request")
    logging.disable()
    rng = np.random.default_rng(0)
    functions = (plan["_get_kv_cache_groups_uniform_page_size"], blocks_of["max_admission_blocks_per_request"])
    devices = {device: in_flight_of(device, defaults, settings) for device in DEVICES}
    write_cases(OUT, [case(rng, devices, *functions) for _ in range(CASES)], source=given.wheel.name)
