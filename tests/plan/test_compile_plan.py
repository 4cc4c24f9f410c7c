"""Plans: a real step compiled for TPUs that are not here, its memory, what it sends and what it computes."""

import dataclasses
import json

import command_line
import jax
import jax.numpy as jnp
import pytest
from command_line import fails
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from small_runs import MODEL
from small_runs import config_of as run

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import from_dict, load_config, to_dict
from swa_jax.model.config import ModelConfig
from swa_jax.model.sharding import MeshConfig, Partition, make_mesh
from swa_jax.plan import hlo
from swa_jax.plan.collectives import collectives
from swa_jax.plan.text import describe
from swa_jax.train.compiler import compiler_options
from swa_jax.train.config import TrainConfig

pytest.importorskip("libtpu")  # the plain suite runs where it has no wheel, too
from swa_jax.base.chips import TARGETS, chip_name
from swa_jax.plan.kernel_cycles import read_table
from swa_jax.plan.plan import plan, topology_devices


def test_what_cannot_be_planned_is_one_sentence():
    known = {"xla_tpu_scoped_vmem_limit_kib": 65536, "xla_tpu_enable_latency_hiding_scheduler": True}
    unknown, much = {"xla_tpu_no_such": 3}, {"xla_tpu_scoped_vmem_limit_kib": "much"}
    for changes, where, sentence in (
        ({}, {"topology": "v5e:3x5x7x9"}, "'v5e:3x5x7x9', which libtpu does not know: .* such as v5e:16x16"),
        ({}, {"stage": 1}, "--stage is 1: the run has stages 0 to 0"),
        ({"rows": 3}, {}, "= 3 cannot be split in 4 .*make it a multiple of 4, or change 'mesh'"),
        ({"xla_options": known | unknown}, {}, r"^'xla_options\.xla_tpu_no_such' = 3 cannot be used: the compiler for"),
        ({"xla_options": known | much}, {}, r"'xla_options\.xla_tpu_scoped_vmem_limit_kib' = much cannot be used"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            plan(run(**changes), **{"topology": "v5e:2x2"} | where)


def test_a_missing_checkpoint_says_how_to_plan_without_it(tmp_path):
    file = tmp_path / "run.yaml"
    settings = to_dict(run()) | {"model": None, "init_from": str(tmp_path / "nothing")}
    file.write_text(json.dumps(settings))
    assert "plan_model=configs/models/NAME.yaml" in fails("compile", file, "--topology", "v5e:2x2")


def test_v7x_is_another_name_of_tpu7x():
    kinds = [[d.device_kind for d in topology_devices(name)] for name in ("v7x:2x2x1", "tpu7x:2x2x1")]
    assert kinds[0] == kinds[1] != []


@pytest.fixture
def simulated(monkeypatch):
    """The calls that a plan asks to be simulated, none of which has a figure."""
    calls = []
    monkeypatch.setattr("swa_jax.bench.simulated_calls.simulated_row", lambda *call: calls.append(call[:3]))
    return calls


@pytest.mark.parametrize("fits", [True, False])
def test_the_exit_status_says_whether_it_fits(fits, simulated, monkeypatch, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(to_dict(run(mesh={"fsdp": -1}).without_auto())))
    monkeypatch.setattr("swa_jax.plan.plan.plan", lambda *_, **__: {"memory": {"fits": fits}})
    monkeypatch.setattr("swa_jax.plan.text.describe", lambda report: "the plan")
    assert command_line.run("compile", file, "--topology", "v5e:2x2", status=0 if fits else 1) == "the plan\n"
    printed = command_line.run("compile", file, "--topology", "v5e:2x2", "--json", status=0 if fits else 1)
    assert json.loads(printed) == {"config": str(file), "overrides": [], "memory": {"fits": fits}}


def test_kernels_that_the_table_lacks_are_simulated_first(monkeypatch, tmp_path):
    row = {"chip": "v5e", "packed": True, "num_sink_tokens": 0, "group": 1, "cycles": 1.0, "length": 8192}

    def simulate(function, chip, sizes, say):
        return row | {"function": function, "head_dim": sizes["D"], "window": sizes["window"]}

    def report(*_, step, **__):
        return {"memory": {"fits": True}, "step": step, "table": [one for one in read_table() if one["cycles"] == 1.0]}

    monkeypatch.setattr("swa_jax.bench.simulated_calls.simulated_row", simulate)
    monkeypatch.setattr("swa_jax.plan.kernel_cycles._added", [])
    monkeypatch.setattr("swa_jax.plan.plan.plan", report)
    monkeypatch.setattr("swa_jax.plan.text.describe", lambda report: "the plan")
    file = tmp_path / "run.yaml"
    model = MODEL | {"head_dim": 96, "attention_activation": "sigmoid"}
    config = run(mesh={"fsdp": -1}, model=model, sliding_window=640)
    file.write_text(json.dumps(to_dict(config.without_auto())))
    for step, expected in (("decode", set()), ("prefill", {"forward"}), ("train", {"forward", "backward"})):
        said = command_line.run("compile", file, "--topology", "v5e:2x2", "--step", step, "--json")
        rows = json.loads(said)["table"]
        assert {row["function"] for row in rows} == {f"sigmoid_{which}" for which in expected}
        assert {(row["head_dim"], row["window"]) for row in rows} <= {(96, 640)}


@pytest.mark.slow
def test_a_training_step(simulated, tmp_path):
    file, out = tmp_path / "run.yaml", tmp_path / "plan.json"
    file.write_text(json.dumps(to_dict(run(mesh={"fsdp": 4, "context": 2}, scan_layers=True))))
    said = command_line.run("compile", file, "--topology", "v5e:2x4", "--out", out)
    report = json.loads(out.read_text())
    assert "FITS" in said
    assert describe(report) in said
    memory, parameters = report["memory"], report["parameters"]
    # Norms are whole on every chip; all else is split in eight, in f32, and Adam keeps two numbers for each.
    assert parameters * 4 / 8 <= memory["parameters"] < parameters * 4 / 8 * 1.02
    assert memory["optimizer"] == pytest.approx(2 * memory["parameters"], rel=1e-3)
    # 8 rows in 4, 4096 tokens in 2, bf16: the input of each of three layers.
    assert memory["activations"] == pytest.approx(3 * 2 * 2048 * 256 * 2, rel=0.1)
    parts = [memory[name] for name in ("parameters", "optimizer", "batch", "activations", "temporaries", "program")]
    assert memory["total"] == sum(parts) + memory["outputs_and_padding"]
    assert memory["capacity"] == TARGETS["v5e"].hbm_gib * 2**30 == memory["free"] + memory["total"]
    # Matrix products: once forward, twice backward and, but for the last of a layer, again for want of memory.
    tokens, down = 8 * 4096 / 8, 256 * 512
    layer, head = 256 * 128 * (2 * 4 + 2 * 2) + 3 * down, 256 * 1024
    rope = 2 * 128**2  # of keys, the other channel of each pair: forward, again, and on the way back
    products = 3 * (4 * layer - down + 3 * rope) + 4 * head
    assert report["flops"]["matmuls"] == pytest.approx(2 * tokens * products)
    time = report["time"]
    assert 0 < time["seconds_hidden"] <= time["seconds"] <= time["seconds_shown"]
    assert time["seconds"] - time["collective_seconds_waited"] == pytest.approx(
        time["xla_seconds"] + time["kernel_seconds"]
    )
    assert 0 < time["mfu"][0] <= time["mfu_scheduled"] <= time["mfu"][1] < 1


@pytest.mark.slow
def test_heads_of_64_are_not_copied_between_projections_and_kernels():
    model = ["num_hidden_layers=1", "hidden_size=512", "num_attention_heads=4", "num_key_value_heads=4"]
    model += ["alibi_negative_heads=2", "alibi_positive_heads=2", "vocab_size=256", "intermediate_size=512"]
    changes = [f"model.{one}" for one in model] + ["stages.0.batch_size=16", "remat=none", "scan_layers=false"]
    config = load_config(TrainConfig, "configs/swat/340m.yaml", [*changes, "mesh={data: 4}"])
    time = plan(config, "v5e:2x2")["time"]
    # What is left is the rotation of the keys; copies of queries, values and cotangents took as much again.
    assert 0 < time["xla_seconds_by_part"]["around_attention"] < 0.5 * time["kernel_seconds"]


@pytest.mark.slow
def test_a_taught_step(tmp_path):
    """A copy of the weights in bf16, and a forward pass of which nothing is kept."""
    model = tmp_path / "model.yaml"
    model.write_text(json.dumps(MODEL))
    start = {"model": None, "init_from": str(tmp_path / "nothing"), "plan_model": str(model), "mesh": {"fsdp": 4}}
    report = plan(run(**start, distill={}, scan_layers=True), "v5e:2x2")
    memory, time = report["memory"], report["time"]
    assert memory["teacher"] == pytest.approx(memory["parameters"] / 2, rel=1e-3)
    # As without a teacher: the input of each of three layers, 2 rows of a chip.
    assert memory["activations"] == pytest.approx(3 * 2 * 4096 * 256 * 2, rel=0.1)
    # As in the step above, and the teacher's: each layer once, the head once more where its logits are made again.
    layer, down, head, rope = 256 * 128 * (2 * 4 + 2 * 2) + 3 * 256 * 512, 256 * 512, 256 * 1024, 2 * 128**2
    products = 3 * (4 * layer - down + 3 * rope) + 4 * head + 3 * (layer + rope) + 2 * head
    assert report["flops"]["matmuls"] == pytest.approx(2 * (8 * 4096 / 4) * products)
    assert time["kernel_seconds_by_layer_type"]["teacher"]["forward"] > 0
    assert "teacher, a forward pass more: 3 layers: FFF" in describe(report)
    assert "weights of the teacher beside them" in describe(report)


@pytest.mark.long
def test_a_row_by_itself_is_routed():
    """Of one row a device, the compiler for v6e refused the gather of its segment ids, which are single numbers."""
    model = MODEL | {"num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8}
    changes = {"pattern": "switch", "sliding_window": 1024, "remat": "attention", "mesh": {"data": 4}}
    config = run(rows=4, length=8192, model=model, **changes)
    assert plan(config, "v6e:2x2")["memory"]["free"] > 0


@pytest.mark.long
def test_a_windowed_layer_sends_no_more_over_the_context_when_rows_grow():
    """Rows four times as long: what windowed layers send stays, what full layers gather grows with it."""
    over_context = {}
    for pattern in ("window", "full"):
        for length in (8192, 32768):
            config = run(length=length, rows=1, pattern=pattern, mesh={"fsdp": 1, "context": 4}, remat="none")
            report = plan(config, "v5e:2x2")
            over_context[pattern, length] = sum(c["bytes"] for c in report["collectives"])
    assert over_context["window", 32768] < 1.02 * over_context["window", 8192]
    assert over_context["full", 32768] > 2 * over_context["full", 8192]


@pytest.mark.long
def test_what_attention_needs_is_kept_on_the_chip_or_on_its_host():
    """8 rows in 4, bf16: of each of three layers the input, the output of 4 heads of 128, and lse in f32."""
    tokens = 2 * 4096
    needed = 3 * tokens * (256 * 2 + 4 * 128 * 2 + 4 * 4)
    kept = plan(run(remat="attention"), "v5e:2x2")
    assert (kept["memory"]["activations"], kept["memory"]["host"]) == (needed, 0)
    away = plan(run(remat="offload"), "v5e:2x2")["memory"]
    assert (away["activations"], away["host"]) == (0, needed)
    again = plan(run(remat="layer"), "v5e:2x2")
    ratio = again["flops"]["attention_forward"] / kept["flops"]["attention_forward"]
    assert ratio == 2


@pytest.mark.parametrize("topology", ["v5e:4x4", "v6e:4x4", "v5p:2x2x4", "v7x:2x2x2"])
def test_weights_over_a_whole_slice_are_scattered_beside_the_step(topology):
    """The SparseCores gather them round all links at once; v5e has none, and sums gradients on every chip."""
    devices = topology_devices(topology)
    partition = Partition(make_mesh(MeshConfig(1, -1, context=2), devices))
    every, none = (NamedSharding(partition.mesh, P(axes)) for axes in (("fsdp", "context"), None))

    def gradient(weights, x):
        whole = jax.lax.with_sharding_constraint(weights, none)
        found = jax.grad(lambda w: jnp.square((x.T @ w).astype(jnp.float32)).sum())(whole)
        return jax.lax.with_sharding_constraint(found, every)

    weights = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16, sharding=every)
    x = jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16, sharding=NamedSharding(partition.mesh, P(None, every.spec[0])))
    compiled = jax.jit(gradient, compiler_options=compiler_options(partition, {})).lower(weights, x).compile()
    program = hlo.parse(compiled.as_text())
    gathered, summed = collectives(program, hlo.executions(program), dict(partition.mesh.shape))
    chip = TARGETS[chip_name(devices[0].device_kind)]
    assert gathered.kind == "all-gather"
    assert summed.kind == ("reduce-scatter" if chip.sparse_cores else "all-reduce")
    assert gathered.asynchronous is summed.asynchronous is chip.sparse_cores
    assert gathered.rings == (2 * chip.torus if chip.sparse_cores else 0)


@pytest.mark.long
def test_slices_are_whole_and_sum_their_gradients_over_the_network_between_them():
    report = plan(run(mesh={"slices": 2, "fsdp": 4}), "v5e:2x2")
    assert (report["devices"], report["slices"], report["mesh"]["data"]) == (8, 2, 2)
    (between,) = [c for c in report["collectives"] if c["axes"] == "slices"]
    assert (between["kind"], between["asynchronous"]) == ("all-reduce", True)
    # Each chip sends its quarter of the gradients, in bf16; among two a ring sends each number once.
    matrices = 3 * (256 * 128 * (2 * 4 + 2 * 2) + 3 * 256 * 512) + 2 * 1024 * 256
    assert between["bytes"] == pytest.approx(matrices * 2 / 4, rel=0.01)
    whole = plan(run(mesh={"data": 2, "fsdp": 4}), "v5e:2x4")
    assert not [c for c in whole["collectives"] if c["axes"] == "slices"]
    assert report["time"]["collective_seconds"] > whole["time"]["collective_seconds"]
    assert "between slices: 25 Gb/s a device" in report["time"]["assumptions"]


@pytest.mark.long
def test_what_does_not_fit_says_by_how_much():
    wide = dataclasses.replace(from_dict(ModelConfig, MODEL), hidden_size=8192, intermediate_size=32768)
    report = plan(run(model=to_dict(wide), remat="none", length=32768, rows=64), "v5e:2x2")
    assert not report["memory"]["fits"]
    assert report["memory"]["free"] < 0
    assert "DOES NOT FIT" in describe(report)
    assert "of a chip" in describe(report)


@pytest.mark.long
@pytest.mark.parametrize("step", ["prefill", "decode"])
def test_generation(step):
    report = plan(run(), "v6e:2x2", step=step, batch_size=4, length=2048)
    memory = report["memory"]
    # The ring of each layer: 512 tokens of two heads, keys and values, in bf16.
    assert memory["cache"] == pytest.approx(3 * 2 * 4 * 512 * 128 * 2 * 2, abs=64)
    assert memory["fits"]
    assert report["collectives"] == []
    rope = (4 + 2) * 128**2  # the other channel of each pair
    matrices = 3 * (256 * 128 * (2 * 4 + 2 * 2) + rope + 3 * 256 * 512)
    tokens = 4 * 2048 if step == "prefill" else 4
    assert report["flops"]["matmuls"] == pytest.approx(2 * (tokens * matrices + 4 * 256 * 1024), rel=0.02)


@pytest.mark.long
def test_adapters_are_held_beside_frozen_weights_in_bfloat16():
    """On a mesh that splits no weight a chip holds all of them, and moments of the adapters only."""
    config = run(length=1024, rows=4, mesh={"data": 4, "fsdp": 1}, lora={"rank": 8})
    adapters = config.lora.num_parameters(config.model)
    report = plan(config, "v5e:2x2")
    memory, frozen = report["memory"], report["parameters"] - adapters
    assert memory["parameters"] == 2 * frozen + 4 * adapters
    assert 0 <= memory["optimizer"] - 8 * adapters < 64  # and a few counters
    # As in a training step, but without the gradients of frozen weights; the adapters' own, and theirs computed again.
    down = 256 * 512
    layer, head = 256 * 128 * (2 * 4 + 2 * 2) + 3 * down, 256 * 1024
    expected = 2 * 1024 * (3 * (3 * layer - down) + 3 * head + 4 * adapters)
    assert report["flops"]["matmuls"] == pytest.approx(expected, rel=0.01)
