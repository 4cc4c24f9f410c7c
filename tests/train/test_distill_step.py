"""Distillation in the step: its loss and gradient beside two separate models, its memory, what it learns, resuming."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from kernels.tolerances import assert_close
from tiny_models import BYTES, SOFTMAX, base_model, byte_checkpoint, make
from training_runs import assert_same_weights, interrupted, losses, read_metrics

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import from_dict
from swa_jax.checkpoint.folder import load_model
from swa_jax.model.decoder import Decoder
from swa_jax.model.lora import LoraConfig, trained_and_frozen, with_lora
from swa_jax.train.config import TrainConfig
from swa_jax.train.loop import train
from swa_jax.train.objectives import hidden_error
from swa_jax.train.patterns import Start
from swa_jax.train.step import _gradients, init_state, make_loss, make_step, make_validation_loss
from swa_jax.train.teacher import check_teacher_fits, find_teacher, kept_weights

RNG = np.random.default_rng(0)
SLOW = pytest.mark.slow
FULL = make("FFFF", sliding_window=None)
LORA = LoraConfig(rank=3, alpha=6.0, dropout=0.0, targets=("q_proj", "k_proj", "o_proj", "up_proj"))
ROWS, LENGTH = 4, 24
# Packed rows: documents of several lengths, padding at the end; the learned tokens are some of them.
SEGMENTS = np.array([[1] * 24, [1] * 9 + [2] * 15, [1] * 5 + [2] * 12 + [0] * 7, [1] * 20 + [0] * 4], np.int32)
BATCH = {
    "tokens": RNG.integers(1, 61, size=(ROWS, LENGTH)).astype(np.int32),
    "segment_ids": SEGMENTS,
    "weights": (RNG.random((ROWS, LENGTH)) < 0.4).astype(np.float32),
    "full_from": np.array([[7, 0], [4, 14], [2, 9], [11, 0]], np.int32),
}


def config_of(distill, **changes) -> TrainConfig:
    stages = [{"steps": 5, "sequence_length": LENGTH, "batch_size": ROWS}]
    settings = {"output": "-", "tokenizer": "-", "init_from": "-", "stages": stages, "distill": distill}
    return from_dict(TrainConfig, settings | {"switch_loss": {"base": 0.0}} | changes)


def teacher_of(config: TrainConfig, pattern=FULL) -> Decoder:
    return find_teacher(config, Start(SOFTMAX, pattern, SOFTMAX))


def moved(tree):
    """Weights some way from where they are."""
    rng = np.random.default_rng(7)
    return jax.tree.map(lambda x: x + jnp.asarray(0.03 * rng.standard_normal(x.shape), x.dtype), tree)


def by_hand(model: Decoder, teacher: Decoder, batch, distill, step: int, total: int):
    """The objective of whole arrays of two models: a token at a time of NumPy's float64 would not be differentiable."""

    def run(model):
        tokens, segments = jnp.asarray(batch["tokens"]), jnp.asarray(batch["segment_ids"])
        full_from = jnp.asarray(batch["full_from"]) if model.pattern.full_attention_decode else None
        context = model.context(tokens, segments, full_from=full_from)
        stream, data = model.begin(tokens)
        graph, stacked = nnx.split(model.layers)
        streams = []
        for i in range(model.config.num_hidden_layers):
            block = nnx.merge(graph, jax.tree.map(lambda weights, i=i: weights[i], stacked))
            stream, _ = block(stream, jax.tree.map(lambda rows, i=i: rows[i], data), context)
            streams.append(stream.x)
        return model.logits(model.norm(stream.x)), jnp.stack(streams)

    logits, streams = run(model)
    their_logits, their_streams = jax.lax.stop_gradient(run(teacher))
    follows = np.zeros((ROWS, LENGTH), np.float32)
    for row, place in itertools.product(range(ROWS), range(LENGTH - 1)):
        here, after = batch["segment_ids"][row, place : place + 2]
        follows[row, place] = here == after != 0
    targets = np.roll(batch["tokens"], -1, axis=1)
    learned = follows * np.roll(batch["weights"], -1, axis=1)
    heard = follows if distill.tokens == "all" else learned
    log_q = jax.nn.log_softmax(logits)
    nll = -jnp.take_along_axis(log_q, targets[..., None], axis=2)[..., 0]
    p = jax.nn.softmax(their_logits / distill.temperature)
    softer = jax.nn.log_softmax(logits / distill.temperature)
    kl = (p * (jnp.log(p) - softer)).sum(-1)
    error = (jnp.square(streams - their_streams).sum(-1) / jnp.square(their_streams).sum(-1)).mean(0)
    last = distill.weight if distill.last_weight is None else distill.last_weight
    share = distill.weight + (last - distill.weight) * step / (total - 1)
    means = {
        "loss": (nll * learned).sum() / learned.sum(),
        "divergence": (kl * heard).sum() / heard.sum(),
        "hidden_error": (error * heard).sum() / heard.sum(),
    }
    objective = (1 - share) * means["loss"] + share * distill.temperature**2 * means["divergence"]
    return objective + distill.hidden * means["hidden_error"], means


CASES = {
    "kl alone": ("wwww", {}, {}),
    "all tokens, softer": ("wwww", {}, {"tokens": "all", "temperature": 2.5, "weight": 0.7}),
    "hidden states": ("wFwh", {"heads": ((), (), (), (1,))}, {"hidden": 0.6, "weight": 0.3, "temperature": 0.5}),
    "schedule, routed": ("SSwS", {}, {"weight": 0.2, "last_weight": 1.0, "tokens": "all", "hidden": 2.0}),
    "answers see all": ("wFwS", {"num_sink_tokens": 1, "full_attention_decode": True}, {"weight": 0.5}),
}


QUICK = (("all tokens, softer", None), ("schedule, routed", LORA))


@pytest.mark.parametrize(
    ("case", "lora"),
    [
        pytest.param(*one, id=f"{one[0]}, {'full' if one[1] is None else 'lora'}", marks=[] if one in QUICK else SLOW)
        for one in itertools.product(CASES, (None, LORA))
    ],
)
def test_loss_and_gradient_are_those_of_two_models(case, lora):
    """The teacher is a model of its own here, with arrays of its own; the student has moved away from it."""
    pieces = 2 if case == "schedule, routed" else 1
    types, fields, distill = CASES[case]
    config = dataclasses.replace(config_of(distill), lora=lora)
    student = base_model(SOFTMAX).with_pattern(make(types, **fields))
    original = nnx.merge(*nnx.split(base_model(SOFTMAX).with_pattern(FULL)))
    if lora is not None:
        student = with_lora(student, lora, nnx.Rngs(1))
    trained, frozen = trained_and_frozen(student)
    teacher = teacher_of(config)
    state = init_state(moved(trained), optax.sgd(0.0), frozen, kept_weights(config, teacher, trained))
    assert bool(jax.tree.leaves(state.teacher)) == (lora is None)
    state.step = jnp.int32(3)
    loss_of = make_loss(student, config, None, teacher)

    def ours(params, state):
        def loss(params, batch, totals, key):
            value, metrics = loss_of(params, state.frozen, batch, totals, key, state)
            return value, metrics | {"objective": value}

        gradients, metrics = _gradients(loss, params, BATCH, pieces, None, None)
        return metrics["objective"], gradients, metrics

    graph, _ = nnx.split(student)

    def theirs(params, frozen):
        return by_hand(nnx.merge(graph, params, frozen), original, BATCH, config.distill, 3, 5)

    objective, gradients, metrics = jax.jit(ours)(state.params, state)
    (wanted, means), expected = jax.jit(jax.value_and_grad(theirs, has_aux=True))(state.params, frozen)
    assert means["divergence"] > 1e-3
    names = ["loss", "divergence"] + ["hidden_error"] * (config.distill.hidden > 0)
    assert_close([metrics[name] for name in names], [means[name] for name in names], "float32")
    assert_close(objective, wanted, "float32")
    assert_close(gradients, expected, "float32", gradient=True)


def test_the_teacher_stays_what_it_was_and_is_no_part_of_a_checkpoint():
    config = config_of({"weight": 0.5})
    student, teacher = base_model(SOFTMAX).with_pattern(make("wwww")), teacher_of(config)
    trained, _ = trained_and_frozen(student)
    state = init_state(jax.tree.map(jnp.copy, trained), optax.sgd(0.1), None, kept_weights(config, teacher, trained))
    step = make_step(student, optax.sgd(0.1), config, None, teacher)
    before = jax.tree.map(np.array, state.teacher)
    for _ in range(2):
        state, metrics = step(state, BATCH, 2)
    jax.tree.map(np.testing.assert_array_equal, state.teacher, before)
    assert float(jnp.abs(state.params["embedding"][...] - state.teacher["embedding"][...]).max()) > 0
    assert not jax.tree.leaves(state.without_frozen().teacher)
    assert state.without_frozen().with_frozen(state).teacher is state.teacher
    assert metrics["divergence"] > 0


def test_held_out_loss_is_of_the_text_alone():
    config, student = config_of({"weight": 0.5}), base_model(SOFTMAX).with_pattern(make("wwww"))
    plain = dataclasses.replace(config, distill=None)
    found = [
        make_validation_loss(student, one, None)(nnx.state(student), nnx.State({}), BATCH) for one in (config, plain)
    ]
    assert found[0] == found[1]


def test_a_layer_of_no_size_has_no_error_without_end():
    """Padding may have hidden states that are zero: no division by it, and no gradient that is no number."""
    x = jnp.ones((1, 1, 4))
    value, gradient = jax.value_and_grad(lambda x: hidden_error(x, jnp.zeros_like(x)).sum())(x)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


# ---- memory ----


def temporaries(distill, *, layers, length=256, vocabulary=61) -> int:
    """Temporary bytes of a compiled step."""
    config = dataclasses.replace(config_of(distill), lora=LORA, remat="none")
    model_config = dataclasses.replace(SOFTMAX, num_hidden_layers=layers, vocab_size=vocabulary)
    full = make("F" * layers, sliding_window=None)
    student = nnx.eval_shape(lambda: Decoder(model_config, make("w" * layers), rngs=nnx.Rngs(0)))
    student = nnx.eval_shape(lambda: with_lora(student, LORA, nnx.Rngs(0)))
    teacher = find_teacher(config, Start(model_config, full, model_config))

    graph, weights = nnx.split(student)

    def begin(weights):
        trained, frozen = trained_and_frozen(nnx.merge(graph, weights))
        return init_state(trained, optax.sgd(0.1), frozen, kept_weights(config, teacher, trained))

    state = jax.eval_shape(begin, weights)
    shape = (4, length)
    dtypes = {"tokens": jnp.int32, "segment_ids": jnp.int32, "weights": jnp.float32}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}
    step = make_step(student, optax.sgd(0.1), config, None, teacher)
    return step.lower(state, batch, 1).compile().memory_analysis().temp_size_in_bytes


def test_the_teacher_keeps_nothing_of_its_layers():
    """Beside the student's activations a teacher takes what one layer works with, however many layers there are."""
    plain, taught = ([temporaries(distill, layers=layers, length=1024) for layers in (4, 8)] for distill in (None, {}))
    a_layer = (plain[1] - plain[0]) / 4
    assert taught[1] - plain[1] < taught[0] - plain[0] + a_layer / 10
    assert taught[0] - plain[0] < a_layer


def test_both_models_logits_exist_in_chunks():
    """Of 4 rows of 1024 tokens in whole, each model's logits would take 134 MB."""
    plain, taught = (temporaries(distill, length=1024, layers=1, vocabulary=8192) for distill in (None, {}))
    assert taught - plain < 4 * 1024 * 8192 * 4 / 3


# ---- what can be asked for ----


@pytest.mark.parametrize(
    ("distill", "sentence"),
    [
        ({"temperature": 0}, r"'distill\.temperature' must be a number above 0, got 0"),
        ({"temperature": float("inf")}, r"'distill\.temperature' must be a number above 0"),
        ({"weight": 1.5}, r"'distill\.weight' must be a share from 0 to 1, got 1\.5"),
        ({"last_weight": -0.1}, r"'distill\.last_weight' must be a share from 0 to 1"),
        ({"hidden": -1}, r"'distill\.hidden' must be 0 or more"),
        ({"weight": 0}, "'distill' learns nothing, as all its weights are 0"),
        ({"top_k": 4, "hidden": 1}, r"'distill\.hidden' is for a teacher that runs in the step: leave it or"),
        ({"top_k": 4, "tokens": "all"}, r"'distill\.tokens' is for a teacher that runs in the step"),
        ({"tokens": "replies"}, r"distill\.tokens"),
        ({"temprature": 2}, r"unknown key 'distill\.temprature'.*did you mean 'temperature'"),
    ],
)
def test_wrong_settings_are_one_sentence(distill, sentence):
    with pytest.raises(ConfigError, match=sentence):
        config_of(distill)


def test_only_a_model_that_is_there_can_teach():
    with pytest.raises(ConfigError, match="one drawn at random knows nothing: set 'init_from' in place of 'model'"):
        config_of({}, init_from=None, model=dataclasses.asdict(BYTES) | {"model_type": "llama"})
    with pytest.raises(ConfigError, match=r"routed layers.*set 'distill\.teacher' to another pattern, such as full"):
        teacher_of(config_of({}), make("SSwS"))
    assert teacher_of(config_of({"teacher": "full"}), make("SSwS")).pattern == FULL


def test_the_teacher_is_the_model_under_its_own_pattern_with_its_own_positions():
    """Gemma's windows are its own; full layers that lose their rotary embeddings lose them in the student alone."""
    own = make("wFwF")
    student = dataclasses.replace(SOFTMAX, rope_layers=("global", "none", "global", "none"))
    teacher = find_teacher(config_of({}), Start(student, own, SOFTMAX))
    assert (teacher.pattern, teacher.config) == (own, SOFTMAX)
    named = find_teacher(config_of({"teacher": "interleave-1-in-2"}), Start(SOFTMAX, own, SOFTMAX))
    assert named.pattern.sliding_window == own.sliding_window
    assert find_teacher(config_of({"top_k": 3}, stages=DISTILLED), Start(SOFTMAX, own, SOFTMAX)) is None


DISTILLED = [
    {"steps": 1, "sequence_length": 8, "batch_size": 1, "data": [{"kind": "distilled", "files": ["replies.jsonl"]}]}
]


def test_a_second_copy_without_room_is_refused(monkeypatch):
    """12 bytes a weight at least, where all are trained in f32; adapters need no copy."""
    monkeypatch.setattr("swa_jax.model.memory.free_memory", lambda: 2.0**30)
    big = dataclasses.replace(SOFTMAX, vocab_size=10_000_000)
    config = config_of({})
    teacher = find_teacher(config, Start(big, FULL, big))
    with pytest.raises(ConfigError, match=r"take 2\.7 GiB, and 1\.0 GiB are free: train adapters \('lora'\)"):
        check_teacher_fits(config, teacher)
    check_teacher_fits(dataclasses.replace(config, lora=LORA), teacher)


# ---- whole runs ----


@pytest.fixture(scope="module")
def base(tmp_path_factory, byte_tokenizer):
    return byte_checkpoint(tmp_path_factory.mktemp("base"), byte_tokenizer, make("FF", sliding_window=None))


def run_settings(base, byte_tokenizer, output, **changes):
    stage = {"steps": 6, "sequence_length": 48, "batch_size": 4, "data": [{"kind": "repeats"}]}
    return {
        "output": str(output),
        "tokenizer": str(byte_tokenizer),
        "init_from": str(base),
        "pattern": "window",
        "sliding_window": 4,
        "stages": [stage],
        "checkpoint_every": 2,
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 1},
        "distill": {"weight": 0.9, "last_weight": 0.4, "temperature": 1.5, "hidden": 0.1, "tokens": "all"},
    } | changes


@pytest.mark.parametrize("lora", [None, pytest.param({"rank": 2, "dropout": 0.2}, marks=SLOW)], ids=["full", "lora"])
def test_a_run_goes_on_bit_for_bit(base, byte_tokenizer, tmp_path, lora):
    whole, parts = (run_settings(base, byte_tokenizer, tmp_path / name, lora=lora) for name in ("whole", "parts"))
    expected = load_model(train(from_dict(TrainConfig, whole), quiet=True))
    interrupted(4, train, from_dict(TrainConfig, parts), quiet=True)
    found = load_model(train(from_dict(TrainConfig, parts), quiet=True))
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    divergences = [[line["divergence"] for line in read_metrics(tmp_path / name)] for name in ("parts", "whole")]
    assert divergences[0] == divergences[1]
    assert_same_weights(found, expected)
    assert (tmp_path / "parts" / "base.sha256").is_file()  # another model does not teach the rest of the run


@SLOW
def test_a_windowed_student_learns_to_copy_its_teacher():
    """The text is drawn at random, so that it says nothing of what the teacher, a random model, says of the next token:
    that is learned from the teacher alone. Both students see the same tokens, and new ones in the end."""
    lora = LoraConfig(rank=8, alpha=16.0, dropout=0.0, targets=(*LORA.targets, "v_proj", "gate_proj", "down_proj"))
    student = with_lora(base_model(SOFTMAX).with_pattern(make("wwww", sliding_window=8)), lora, nnx.Rngs(1))
    optimizer, rng, found = optax.adam(1e-2), np.random.default_rng(3), {}
    drawn = rng.integers(1, 61, size=(150, ROWS, LENGTH)).astype(np.int32)
    for name, distill in {"text": {"weight": 0.0, "hidden": 1e-9}, "teacher": {}}.items():
        config = dataclasses.replace(config_of(distill), lora=lora)
        step = make_step(student, optimizer, config, None, teacher_of(config))
        trained, frozen = jax.tree.map(jnp.copy, trained_and_frozen(student))
        state = init_state(trained, optimizer, frozen)
        said = []
        for tokens in drawn:
            batch = BATCH | {"tokens": tokens, "weights": np.ones((ROWS, LENGTH), np.float32)}
            state, metrics = step(state, batch, 1)
            said.append(float(metrics["divergence"]))  # before the step learns of these tokens
        found[name] = np.mean(said[-20:]) / np.mean(said[:3])
    assert found["teacher"] < 0.9 < 1.5 < found["text"], found
