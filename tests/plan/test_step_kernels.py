"""What really runs: the train, prefill and decode steps of every configuration, and the kernels of docs/kernels.md.

The steps are traced for a v6e, which need not be here, with one device and the sizes of the configuration.
"""

import dataclasses
import json
import re
from pathlib import Path

import numpy as np
import pytest

from swa_jax.base.settings import load_config
from swa_jax.bench.compile_for_chip import kernel_name, pallas_calls
from swa_jax.checkpoint.families import model_config
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import FULL, HYBRID, SWITCH, WINDOW
from swa_jax.model.sharding import MeshConfig
from swa_jax.plan.plan import topology_devices, trace_generation, trace_training
from swa_jax.train.config import ModelChanges, TrainConfig
from swa_jax.train.patterns import find_start

pytest.importorskip("libtpu")
ROOT = Path(__file__).parents[2]
FILES = [
    str(file.relative_to(ROOT))
    for file in sorted((ROOT / "configs").rglob("*.yaml"))
    if "stages:" in file.read_text() or "base:" in file.read_text()
]
MODELS = {"swiattn": "swiattn-1.5b"} | {name: name for name in (f"qwen3-{size}b" for size in ("1.7", "4", "8", "14"))}


def read(file: str) -> TrainConfig:
    """The configuration on one device; a model that it starts from is one of the same family, drawn at random."""
    config = load_config(TrainConfig, file, ["mesh={}", "output=run", "tokenizer=none"])
    if config.init_from is None:
        return config
    name = next((model for part, model in MODELS.items() if part in file and "tiny" not in file), None)
    if name is None:
        model = model_config(json.loads(Path("swa_jax/recall/config.json").read_text()))
    else:
        model = load_config(ModelConfig, f"configs/models/{name}.yaml")
    return dataclasses.replace(
        config,
        init_from=None,
        init_optimizer=False,
        model_changes=ModelChanges(),
        model=config.model_changes.apply(model),
    )


def named_in_the_docs(row: str) -> set[str]:
    """The kernels in the TPU column of a row of the table."""
    text = (ROOT / "docs" / "kernels.md").read_text()
    (cells,) = re.findall(rf"^\| {re.escape(row)} \| ([^|]*) \|", text, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", cells))


def expected(model, step: str) -> set[str]:
    pattern, config = model.pattern, model.config
    if step == "decode":
        return named_in_the_docs("decode")
    window = "window, sink tokens, packed" if pattern.num_sink_tokens else "window, packed"
    if step == "train" and pattern.full_attention_decode:
        window = "window, full_from"
    routed = "routed, packed" if step == "train" else "routed, inference"
    rows = {FULL: "full causal, packed", WINDOW: window, HYBRID: "window, full_heads", SWITCH: routed}
    kernels = set().union(*(named_in_the_docs(rows[kind]) for kind in pattern.layer_types))
    if step != "train":
        return {name for name in kernels if "backward" not in name}
    by_head = config.qk_norm and config.qk_norm_over == "head"
    return kernels | ({"norm_gradient"} if by_head and config.head_dim % 128 == 0 else set())


SLOW = ("configs/bosch/qwen3-8b.yaml", "configs/swaa/qwen3-4b-lora.yaml", "configs/swiattn/cpt-32k.yaml")


def cost(file: str) -> tuple:
    if file == "configs/swat/340m.yaml":
        return ()
    return (pytest.mark.slow,) if file in SLOW else (pytest.mark.long,)


@pytest.mark.parametrize("step", ["train", "prefill", "decode"])
@pytest.mark.parametrize("file", [pytest.param(file, marks=cost(file)) for file in FILES])
def test_the_steps_of_every_configuration_contain_the_kernels_of_the_docs(monkeypatch, file, step):
    monkeypatch.chdir(ROOT)
    config = read(file)
    devices, start = topology_devices("v6e:1x1"), find_start(config)
    stage = config.stages[-1]
    if step == "train":
        traced = trace_training(config, stage, start, devices)
    else:
        length = min(stage.sequence_length, 8192)
        traced = trace_generation(config, stage, start, devices, step, batch_size=1, length=length)
    calls = list(pallas_calls(traced.program.jaxpr.jaxpr))
    found = {kernel_name(eqn) for eqn in calls}
    assert found - {"write_pool"} == expected(traced.model, step)
    if step == "train":
        model = traced.model.config
        width = model.head_dim * (2 if {*traced.model.pattern.layer_types} == {WINDOW} else 1)  # heads in pairs
        tables = 2 if model.uses_rope and width % 128 == 0 else 0
        # Routed rows come rotated to the pass outside; the norm comes before.
        outside = {"scheduled_backward"} if {*traced.model.pattern.layer_types} == {SWITCH} else set()
        unrotated = outside | {"norm_gradient"}
        for eqn in calls:
            assert tables_read(eqn) == (0 if kernel_name(eqn) in unrotated else tables), kernel_name(eqn)


def tables_read(eqn) -> int:
    """How many tables of cosines and sines [B, T, D] f32 a kernel reads, by which it rotates its queries."""
    read = [x.aval for x in eqn.invars if x.aval.dtype == np.float32 and len(x.aval.shape) == 3]
    return sum(x.shape[1] != 8 for x in read)  # what differs by head is [H, 8, 128]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "replaced"),
    [
        ("configs/swiattn/cpt-32k.yaml", {"window_backward"}),
        pytest.param("configs/bosch/qwen3-8b.yaml", set(), marks=pytest.mark.long),
    ],
)
def test_devices_that_share_a_row_run_the_kernels_of_one(monkeypatch, file, replaced):
    """But for `replaced`: where a window's queries are in two chunks of a row, scheduled kernels run."""
    monkeypatch.chdir(ROOT)
    config = dataclasses.replace(read(file), mesh=MeshConfig(data=1, fsdp=1, context=4))
    traced = trace_training(config, config.stages[-1], find_start(config), topology_devices("v5p:2x2x1"))
    found = {kernel_name(eqn) for eqn in pallas_calls(traced.program.jaxpr.jaxpr)}
    assert found == expected(traced.model, "train") - replaced
