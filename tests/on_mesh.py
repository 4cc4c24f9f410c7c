"""Run by test_sharding in a process with eight devices: `python -m tests.on_mesh CHECK`, a name in the last lines.

Every mesh gives what one device gives: attention with its gradients, the losses and gradients of twenty steps, and
what NLL-guided selection says of each layer. `small` is the least that meets every kind of exchange between devices.
"""

import dataclasses
import functools
import re
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import AttentionSpec, alibi_slopes
from pallas_kernels.math import ring
from pallas_kernels.math.spec import Packing, PerHead, segment_positions
from swa_jax.base.settings import from_dict
from swa_jax.checkpoint.families.pattern_files import load_pattern
from swa_jax.evaluate import Example
from swa_jax.model.config import ModelConfig
from swa_jax.model.decoder import Decoder
from swa_jax.model.draws import normal, split_over_devices
from swa_jax.model.experts import MixtureOfExperts
from swa_jax.model.head_norm import normed_heads
from swa_jax.model.layers import Norm
from swa_jax.model.lookup import rows_of
from swa_jax.model.lora import trained_and_frozen, with_lora
from swa_jax.model.loss import Teacher, TeacherStates, token_loss
from swa_jax.model.mesh_attention import StaticOptions, attention_on_mesh
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.sequence_order import zigzag
from swa_jax.model.sharding import MeshConfig, Partition, ShardingRules, make_mesh
from swa_jax.model.window import Window
from swa_jax.select import LayerScorer, nll_deltas
from swa_jax.train.config import TrainConfig
from swa_jax.train.loop import place_batch, random_model
from swa_jax.train.objectives import Distill
from swa_jax.train.optimizer import make_optimizer
from swa_jax.train.patterns import Start
from swa_jax.train.step import init_state, make_step, shard_state
from swa_jax.train.teacher import find_teacher, kept_weights

from .kernels.tolerances import assert_close

MESHES = {
    "8x1x1x1": MeshConfig(8, 1, 1, 1),
    "1x8x1x1": MeshConfig(1, 8, 1, 1),
    "2x2x1x2": MeshConfig(2, 2, 1, 2),
    "1x1x8x1": MeshConfig(1, 1, 8, 1),
    "1x2x2x2": MeshConfig(1, 2, 2, 2),
}
# For models with experts, beside the others.
EXPERT_MESHES = {
    "expert 8": MeshConfig(1, 1, 1, 1, expert=8),
    "fsdp 2, expert 2, tensor 2": MeshConfig(1, 2, 1, 2, expert=2),
    "context 2, expert 4": MeshConfig(1, 1, 2, 1, expert=4),
}
BATCH, LENGTH = 8, 64
SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def segments(*lengths: int) -> list[int]:
    """Ids of packed documents; a negative length is padding."""
    return [i + 1 if n > 0 else 0 for i, n in enumerate(lengths) for _ in range(abs(n))]


PACKED = np.array([segments(64), segments(7, 9, 41, 7), segments(30, 1, 1, 32), segments(-5, 20, 30, -9)] * 2)


def in_row_order(x, pieces):
    """The inverse of `zigzag`."""
    return x[:, jnp.argsort(zigzag(jnp.arange(x.shape[1])[None], pieces)[0])]


def attend(q, k, v, spec, options, partition, implementation=None):
    """`attention_on_mesh` of rows in their own order, however the partition has them lie."""
    here = there = lambda x: x
    packing = Packing(q_segment_ids=options.get("segment_ids"), full_from=options.get("full_from"))
    gate = options.get("gate")
    if partition is not None and partition.zigzag:
        here, there = (functools.partial(f, pieces=partition.size("sequence")) for f in (zigzag, in_row_order))
        ids = packing.q_segment_ids if packing.q_segment_ids is not None else jnp.ones(q.shape[:2], jnp.int32)
        packing = packing._replace(q_segment_ids=here(ids), q_positions=here(segment_positions(ids)))
    out, disagreement = attention_on_mesh(
        (here(q), None), here(k), here(v), PerHead(*(options.get(name) for name in PerHead._fields)), packing,
        StaticOptions(spec, implementation=implementation), None if gate is None else here(gate), partition=partition,
    )  # fmt: skip
    return there(out), there(disagreement)


def check_attention(implementation: str | None = None, among: Sequence[str] | None = None, zigzag: bool = True) -> None:
    """All cases on all meshes, or those of `among` by `implementation` on four devices along the context."""
    rng = np.random.default_rng(0)
    heads, kv_heads, size = 4, 2, 8
    q, k, v = (jnp.asarray(rng.normal(size=(BATCH, LENGTH, h, size)), jnp.float32) for h in (heads, kv_heads, kv_heads))
    packed = {"segment_ids": jnp.asarray(PACKED)}
    gate = {"gate": jnp.asarray(rng.uniform(size=(BATCH, LENGTH)) < 0.3, jnp.float32)}
    full_from = {"full_from": jnp.asarray(rng.integers(0, 40, size=(BATCH, 4)))}
    full_heads = {"full_heads": jnp.array([True, False])}
    window, sinks = AttentionSpec(window=5), AttentionSpec(window=5, num_sink_tokens=3)
    cases = {
        "full": (AttentionSpec(), {}),
        "full, packed": (AttentionSpec(), packed),
        "window 1": (AttentionSpec(window=1), {}),
        "window": (window, {}),
        "window, packed": (window, packed),
        "window over several devices, packed": (AttentionSpec(window=20), packed),
        "window as long as the row": (AttentionSpec(window=64), {}),
        "chunked": (AttentionSpec(window=20, chunked=True), {}),
        "chunked, sink tokens, packed": (AttentionSpec(window=20, num_sink_tokens=3, chunked=True), packed),
        "sink tokens": (sinks, {}),
        "sink tokens, packed": (sinks, packed),
        "many sink tokens, packed": (AttentionSpec(window=20, num_sink_tokens=10), packed),
        "full-attention decode": (sinks, packed | full_from),
        "head hybrid": (sinks, packed | full_heads),
        "routed": (sinks, packed | gate),
        "sigmoid": (AttentionSpec(window=5, activation="sigmoid"), packed | {"alibi_slopes": alibi_slopes(2, 2)}),
        "sigmoid, head hybrid": (
            AttentionSpec(window=5, activation="sigmoid"),
            packed | full_heads | {"alibi_slopes": alibi_slopes(2, 2), "sigmoid_bias": jnp.full(4, -1.0)},
        ),
        "sigmoid, routed": (AttentionSpec(window=5, activation="sigmoid"), packed | gate),
    }
    partitions = [None, *(Partition(make_mesh(MESHES[name])) for name in ("1x1x8x1", "1x2x2x2"))]
    partitions += [Partition(make_mesh(MeshConfig(1, 2, 4, 1)), zigzag=True)]
    if among is not None:
        cases = {name: cases[name] for name in among}
        partitions = [None, dataclasses.replace(partitions[-1], zigzag=zigzag)]
    for name, (spec, options) in cases.items():
        real = (PACKED > 0)[:, :, None, None] if "segment_ids" in options else 1

        def loss(q, k, v, partition, spec=spec, options=options, real=real):
            here = None if partition is None else implementation
            out, disagreement = attend(q, k, v, spec, options, partition, here)
            return jnp.sum(jnp.sin(out * real)) + jnp.sum(disagreement * jnp.cos(jnp.arange(LENGTH))), out * real

        differentiate = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)
        results = [jax.jit(differentiate, static_argnums=3)(q, k, v, partition) for partition in partitions]
        for (_, out), gradients in results[1:]:
            (_, expected), expected_gradients = results[0]
            assert_close({name: out}, {name: expected}, "float32")
            assert_close({name: gradients}, {name: expected_gradients}, "float32", gradient=True)


def check_ring(implementation: str, among: Sequence[str]) -> None:
    """Keys that go round, as those of long rows do; `among` the cases of `check_attention`."""
    gathered = ring.LONGEST_GATHERED
    ring.LONGEST_GATHERED = 0
    try:
        check_attention(implementation, among)
    finally:
        ring.LONGEST_GATHERED = gathered


def check_whole_rows() -> None:
    """Layers whose queries see the row: keys that go round, and keys that are gathered."""
    among = ["full", "full, packed", "full-attention decode", "head hybrid", "routed"]
    among += ["sigmoid, head hybrid", "sigmoid, routed"]
    for implementation in ("xla", "tpu"):
        check_ring(implementation, among)
    check_attention("tpu", among, zigzag=False)


def check_draws() -> None:
    """Each device draws its part of a parameter: nothing on it is as long as the whole."""
    sharding = NamedSharding(make_mesh(MeshConfig(1, 8, 1, 1)), PartitionSpec(None, "fsdp"))
    whole, part = str(30 * 56), f"[30,{56 // 8}]"

    def compiled() -> str:
        draw = jax.jit(lambda key: normal(1.0)(key, (30, 56), jnp.float32), out_shardings=sharding)
        return draw.lower(jax.random.key(0)).compile().as_text()

    assert whole in compiled()
    with split_over_devices():
        text = compiled()
    assert part in text
    assert whole not in text


def check_small() -> None:
    """The tokens, heads and vocabulary of one row over eight devices: forward attention, and a loss with gradients."""
    check_draws()
    for implementation in ("tpu", "xla"):
        check_ring(implementation, ("full, packed",))
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, LENGTH, h, 8)), jnp.float32) for h in (4, 2, 2))
    ids = {"segment_ids": jnp.asarray(PACKED[1:3])}
    gate = {"gate": jnp.asarray(rng.uniform(size=(2, LENGTH)) < 0.3, jnp.float32)}
    split = [Partition(make_mesh(MeshConfig(1, 1, context, 8 // context))) for context in (8, 4)]
    zigzags = [dataclasses.replace(split[1], zigzag=True)]
    cases = {  # each with the meshes that its exchanges take
        "halo over several devices": (AttentionSpec(window=20), ids, split[:1]),
        "sink tokens": (AttentionSpec(window=5, num_sink_tokens=3), ids, split[:1]),
        "chunked": (AttentionSpec(window=20, chunked=True), ids, split[:1]),
        "routed, heads split": (AttentionSpec(window=5), ids | gate, split[1:]),
        "zig-zag": (AttentionSpec(), ids, zigzags),
        "zig-zag, halo": (AttentionSpec(window=8), ids, zigzags),
        "zig-zag, sink tokens": (AttentionSpec(window=5, num_sink_tokens=3), ids, zigzags),
    }
    for name, (spec, options, partitions) in cases.items():

        def run_on(partition, spec=spec, options=options):
            return attend(q, k, v, spec, options, partition, implementation="reference")

        expected = jax.jit(run_on, static_argnums=0)(None)
        for partition in partitions:
            got = jax.jit(run_on, static_argnums=0)(partition)
            assert_close({name: got}, {name: expected}, "float32")

    check_experts()
    table, head = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((32, 8), (8, 32)))
    tokens, targets = jnp.asarray(rng.integers(32, size=(2, 2, LENGTH)))
    unknown = tokens.at[0, :2].set(jnp.asarray([-1, 32]))
    looked_up = jax.jit(rows_of, static_argnums=2)(table, unknown, split[1])
    np.testing.assert_array_equal(looked_up, rows_of(table, unknown))
    assert np.isnan(looked_up).all(-1).sum() == 2
    # Tokens of every part of the vocabulary, and less than all of the probability.
    likely = jnp.asarray(rng.permuted(np.tile(np.arange(32), (2, LENGTH, 1)), axis=-1)[..., :5])
    teacher = Teacher(likely, jnp.asarray(np.log(rng.dirichlet(np.ones(6), (2, LENGTH))[..., :5]), jnp.float32))
    theirs = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, LENGTH, 8), (8, 32)))
    states = TeacherStates(*theirs, jnp.asarray(PACKED[1:3] != 0, jnp.float32), 1.5)
    for said in (teacher, states):

        def loss(table, head, partition, said=said):
            hidden = rows_of(table, tokens, partition)
            found = token_loss(hidden, head, targets, jnp.ones((2, LENGTH)), teacher=said, partition=partition)
            return jnp.sum(found.nll + jnp.square(found.log_z) + 3 * found.divergence), found.correct

        differentiate = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=2)
        got, expected = ({"loss": differentiate(table, head, partition)} for partition in (split[1], None))
        assert_close(got, expected, "float32", gradient=True)
    # Each device's tokens add to all of the table, but only its part of the sum comes back to it.
    program = differentiate.lower(table, head, split[0]).compile().as_text()
    assert " reduce-scatter(" in program
    assert not re.search(r"= f32\[(8,32|32,8)\]\S* all-reduce\(", program), program


def check_experts() -> None:
    """A mixture's output, load and gradients, its experts, tokens and width split by turns."""
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = ModelConfig(
        **sizes, num_attention_heads=1, num_key_value_heads=1, head_dim=8, initializer_range=0.5, mlp_bias=True,
        num_experts=8, num_experts_per_tok=3, moe_intermediate_size=4, norm_topk_prob=True,
    )  # fmt: skip
    module = MixtureOfExperts(config, jnp.dtype(jnp.float32), nnx.Rngs(0))
    for _, variable in nnx.to_flat_state(nnx.state(module)):
        variable[...] = 0.4 * jax.random.normal(jax.random.key(variable.size), variable.shape)
    graph, state = nnx.split(module)
    x = jax.random.normal(jax.random.key(1), (8, 6, 8))
    counted = jnp.asarray(PACKED[:, 5:11] > 0)

    def loss(state, x, partition):
        y, load = nnx.merge(graph, state)(x, counted, partition)
        return jnp.sum(jnp.sin(y)) + load.chosen @ load.probability, (y, load)

    differentiate = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True), static_argnums=2)
    expected = differentiate(state, x, None)
    split, whole = ShardingRules(), ShardingRules(batch=("data", "fsdp"))  # of tokens along the experts' axis
    eight, with_width, with_tokens = EXPERT_MESHES.values()
    places = (eight, whole), (with_width, split), (with_width, whole), (with_tokens, split)
    for mesh, rules in (*places, (MeshConfig(2, 2, 1, 2), split)):
        got = differentiate(state, x, Partition(make_mesh(mesh), rules))
        assert_close({f"experts, {mesh}": got}, {f"experts, {mesh}": expected}, "float32", gradient=True)


MODELS = {
    "full": {"pattern": "full"},
    "window": {"pattern": "window"},
    "window, zig-zag": {"pattern": "streaming", "sequence_order": "zigzag"},
    # And what a mesh splits otherwise: norms over the whole projection, RoPE by layer, a softcap over the vocabulary.
    "layers": {
        "pattern": "interleave-1-in-2",
        "model": {
            "norm_placement": "sandwich",
            "qk_norm": True,
            "qk_norm_over": "projection",
            "rope_layers": ["local", "none"],
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 4,
                "llama_4_scaling_beta": 0.5,
            },
            "hidden_act": "gelu_tanh",
            "attention_softcap": 2.0,
            "logit_softcap": 3.0,
            "logit_multiplier": 1.5,
            "embedding_multiplier": 4.0,
        },
    },
    "parallel": {
        "pattern": "interleave-1-in-2",
        "model": {
            "gated_mlp": False,
            "hidden_act": "xielu",
            "norm_type": "layer",
            "norm_bias": True,
            "norm_placement": "parallel",
            "rope_interleaved": True,
            "partial_rotary_factor": 0.5,
        },
    },
    # Heads of two shapes, inputs of single layers.
    "two shapes": {
        "pattern": "interleave-1-in-2",
        "model": {
            "rope_layers": ["local", "global"],
            "global_head_dim": 16,
            "qk_norm": True,
            "v_norm": True,
            "layer_scalar": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64,
        },
    },
    "shared keys": {"pattern": "interleave-1-in-2", "model": {"num_kv_shared_layers": 1, "use_double_wide_mlp": True}},
    "heads": {
        "pattern": AttentionPattern(("head_hybrid_attention",) * 2, 12, num_sink_tokens=2, full_kv_heads=((0,), (1,)))
    },
    "routed": {"pattern": "switch"},
    "lora": {
        "pattern": "layers:1",
        "lora": {"rank": 2, "alpha": 8, "targets": ["q_proj", "v_proj", "o_proj", "down_proj"]},
        "learning_rate": 1e-2,
    },
    "experts": {
        "pattern": "interleave-1-in-2",
        "model": {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "mlp_layer_types": ["sparse", "dense"],
        },
    },
    "fused experts": {
        "pattern": "switch",
        "model": {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "mlp_bias": True,
            "fused_experts": True,
            "swiglu_limit": 0.02,
            "sink_logits": True,
        },
    },
    "sigmoid": {
        "pattern": "window",
        "model": {
            "attention_activation": "sigmoid",
            "position_embedding": "alirope",
            "alibi_negative_heads": 2,
            "alibi_positive_heads": 2,
        },
    },
}


def training_config(model: dict, learning_rate: float, **settings) -> TrainConfig:
    stages = [{"steps": 20, "sequence_length": LENGTH, "batch_size": BATCH}]
    # Steps small enough that rounding does not grow along the way.
    optimizer = {"learning_rate": learning_rate, "warmup_steps": 2, "eps": 1e-4}
    fixed = {"output": "-", "tokenizer": "-", "model": SIZES | model, "optimizer": optimizer, "stages": stages}
    return from_dict(TrainConfig, fixed | settings)


def training_batch() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    tokens = rng.integers(1, 64, size=(BATCH, LENGTH)).astype(np.int32)
    weights = rng.random((BATCH, LENGTH)).astype(np.float32)
    return {"tokens": tokens, "segment_ids": PACKED.astype(np.int32), "weights": weights}


def check_training() -> None:
    batch = training_batch() | {"weights": np.ones((BATCH, LENGTH), np.float32)}
    for name, settings in MODELS.items():
        config = training_config(
            settings.get("model", {}),
            settings.get("learning_rate", 1e-3),
            z_loss=1e-4,
            router_aux_loss_coef=0.01 if "experts" in name else 0.0,
            lora=settings.get("lora"),
            sequence_order=settings.get("sequence_order", "auto"),
        )
        pattern = load_pattern(settings["pattern"], config.model, Window(12))
        expected = run(config, pattern, None, batch, pieces=1)
        meshes = MESHES | (EXPERT_MESHES if config.model.num_experts else {})
        for mesh_name, mesh in meshes.items():
            partition = Partition(make_mesh(mesh))
            # Accumulation changes nothing either, but what dropout drops and how pieces balance their experts.
            whole = config.lora is not None or config.router_aux_loss_coef
            pieces = 2 if partition.size("batch") <= 4 and not whole else 1
            assert_same_run(run(config, pattern, partition, batch, pieces), expected, f"{name}, {mesh_name}")
        assert expected[0][-1] < expected[0][0] - 0.03, name
        print(name, "ok", flush=True)


def check_teacher() -> None:
    """A windowed student beside its teacher on meshes of 2 x 2, where rows lie in zig-zag order for the teacher."""
    batch = training_batch()
    distill = Distill(tokens="all", temperature=1.5, weight=0.3, last_weight=0.9, hidden=0.2)
    for lora in (None, {"rank": 2, "dropout": 0.0}):
        config = training_config({}, 1e-3, lora=lora)
        pattern = load_pattern("window", config.model, Window(12))
        expected = run(config, pattern, None, batch, 1, distill)
        for mesh in (MeshConfig(1, 2, 2, 1), MeshConfig(2, 1, 1, 2))[: 1 if lora else 2]:
            partition = Partition(make_mesh(mesh, jax.devices()[:4]))
            assert_same_run(run(config, pattern, partition, batch, 2, distill), expected, f"{lora}, {mesh}")


Run = tuple[list[float], list[float], dict[str, np.ndarray]]


def assert_same_run(found: Run, expected: Run, where: str) -> None:
    def close(path, ours, theirs) -> None:
        name = f"{where}, {jax.tree_util.keystr(path)}"
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5, err_msg=name)

    jax.tree_util.tree_map_with_path(close, found, expected)


def run(config, pattern, partition, batch, pieces, distill=None) -> Run:
    """Losses and gradient norms of twenty steps, and Adam's first moments after them: the gradients of every tensor,
    summed over the steps. With `distill` the teacher is the model at the start, in full attention."""
    model: Decoder = random_model(config.model, pattern, 0, partition)
    if config.lora is not None:
        model = with_lora(model, config.lora, nnx.Rngs(0))
    optimizer: optax.GradientTransformation = make_optimizer(config.optimizer, config.total_steps, model.config)
    trained, frozen = trained_and_frozen(model)
    teacher = None
    if distill is not None:
        config = dataclasses.replace(config, model=None, init_from="-", distill=distill)
        teacher = find_teacher(config, Start(model.config, load_pattern("full", model.config), model.config))
    state = init_state(trained, optimizer, frozen, kept_weights(config, teacher, trained))
    state = shard_state(state, partition, model.config)
    step = make_step(model, optimizer, config, partition, teacher)
    losses, norms = [], []
    for _ in range(20):
        state, metrics = step(state, place_batch(batch, partition, BATCH), pieces)
        losses.append(float(metrics["loss"] + metrics.get("divergence", 0) + metrics.get("hidden_error", 0)))
        norms.append(float(metrics["gradient_norm"]))
    moments = jax.tree_util.tree_leaves_with_path(optax.tree.get(state.optimizer, "mu"))
    return losses, norms, {jax.tree_util.keystr(path): np.asarray(x) for path, x in moments}


def check_selection() -> None:
    rng = np.random.default_rng(2)
    config = ModelConfig(**SIZES | {"num_hidden_layers": 3}, initializer_range=0.2)
    model = Decoder(config, AttentionPattern.from_recipe("full", 3), rngs=nnx.Rngs(0))
    # Six rows for eight devices, and a prompt that the window holds.
    examples = [
        Example(rng.integers(64, size=n).tolist(), rng.integers(64, size=3).tolist(), [])
        for n in (40, 33, 52, 45, 38, 5)
    ]
    options = {"window": Window(6, 1, True), "toggles_at_once": 2}
    plain = nll_deltas(model, examples, Window(6, 1, True), toggles_at_once=0)
    assert (np.abs(plain.deltas[:-1]).max(0) > 1e-3).all()
    named = LayerScorer(model, examples, Window(6, 1, True)).gradient([1])
    assert (np.abs(named[[0, 2]]) > 1e-4).all()
    for name in ("8x1x1x1", "1x8x1x1", "2x2x1x2", "1x2x2x2"):
        partition = Partition(make_mesh(MESHES[name]))
        got = nll_deltas(model, examples, partition=partition, **options)
        np.testing.assert_allclose(got.deltas, plain.deltas, rtol=0, atol=1e-6, err_msg=name)
        assert (got.deltas[-1] == 0).all(), name
        gradient = LayerScorer(model, examples, partition=partition, **options).gradient([1])
        np.testing.assert_allclose(gradient, named, rtol=1e-3, atol=1e-5, err_msg=name)
        print(name, "ok", flush=True)


def check_norms() -> None:
    """Norms of heads whose gradients a kernel computes."""
    x, dout = (jax.random.normal(jax.random.key(i), (4, 256, 4, 128)) for i in range(2))
    norm = Norm("layers.attention.q_norm", ModelConfig(**SIZES | {"head_dim": 128, "qk_norm": True}), x.dtype)
    norm.scale[...] = jnp.linspace(-1, 3, 128)
    differentiate = jax.jit(jax.grad(lambda *given: (normed_heads(*given) * dout).sum(), (0, 1)), static_argnums=2)
    expected = jax.grad(lambda norm, x: (norm(x) * dout).sum(), (0, 1))(norm, x)
    for partition in (None, *(Partition(make_mesh(MESHES[name])) for name in ("2x2x1x2", "1x2x2x2"))):
        assert_close(differentiate(norm, x, partition), expected, "float32", gradient=True)


if __name__ == "__main__":
    checks = {
        "small": check_small,
        "attention": check_attention,
        "rows": check_whole_rows,
        "training": check_training,
        "selection": check_selection,
        "teacher": check_teacher,
        "norms": check_norms,
    }
    checks[sys.argv[1]]()
