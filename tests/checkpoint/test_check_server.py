"""The receipt of an export: a server with a planted fault is named for what it computes, and a right one is right."""

import contextlib
import dataclasses
import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import tiny_models
from command_line import run
from flax import nnx
from layer_letters import types_of
from planted_server import Planted, serving, with_config, with_noise
from web_server import Requests, web_server

from swa_jax.checkpoint import check_server
from swa_jax.checkpoint.canary import Size, choose_size, write_canary
from swa_jax.checkpoint.folder import load_model, open_checkpoint, save_model
from swa_jax.checkpoint.readings import readings_of
from swa_jax.checkpoint.served_cache import Memory
from swa_jax.model.config import ModelConfig, RopeScaling
from swa_jax.model.decoder import Decoder
from swa_jax.model.layer_stacks import layer_stacks
from swa_jax.model.layer_types import WINDOW
from swa_jax.model.pattern import AttentionPattern

# Everything that a class may forget: windows, RoPE by layer and scaled, softcaps, scales, factors, norms, sink logits.
RICH = dataclasses.replace(
    tiny_models.SANDWICH,
    attention_bias=True,
    sink_logits=True,
    rope_layers=("local", "global", "local", "none"),
    rope_theta=300.0,
    rope_scaling=RopeScaling("linear", 4.0),
    max_position_embeddings=128,
)
SHORT = dataclasses.replace(tiny_models.SOFTMAX, attention_bias=False, qk_norm=False, max_position_embeddings=128)
MODELS = {
    "rich": (RICH, tiny_models.make("FwwF")),
    "sink tokens": (SHORT, tiny_models.make("wwFw", num_sink_tokens=3)),
    "heads": (SHORT, tiny_models.make("hhwh", ((0,), (1,), (), (0,)))),
    "decode": (SHORT, tiny_models.make("wwFw", num_sink_tokens=3, full_attention_decode=True)),
    "gated": (
        dataclasses.replace(tiny_models.SHARED_EXPERTS, mlp_layer_types=(), max_position_embeddings=128),
        tiny_models.make("wFwF"),
    ),
    "full": (SHORT, tiny_models.make("FFFF", sliding_window=None)),
    "routed": (SHORT, tiny_models.make("SSwS")),
    "experts": (dataclasses.replace(tiny_models.MIXED, max_position_embeddings=128), tiny_models.make("wFwF")),
    "own key only": (SHORT, tiny_models.make("wwFw", sliding_window=1)),
}


@pytest.fixture(scope="session")
def exported(tmp_path_factory):
    """For a name of MODELS: the folder of its export, the decoder, and what the command said."""
    folder = tmp_path_factory.mktemp("exported")
    found = {}

    def of(name):
        if name not in found:
            config, pattern = MODELS[name]
            model = Decoder(config, pattern, rngs=nnx.Rngs(1))
            rng = np.random.default_rng(0)
            stacks = [getattr(model.layers, like.name, model.layers) for like in layer_stacks(config)]
            attention = stacks[0].attention  # what starts at 0 would hardly be missed
            for parameter in (attention.q_proj.bias, attention.v_proj.bias, getattr(attention, "sink_logits", None)):
                if parameter is not None:
                    parameter[...] = rng.standard_normal(parameter.shape).astype(np.float32)
            checkpoint = save_model(model, folder / name)
            note = run("export", checkpoint, folder / f"{name} exported")
            found[name] = (folder / f"{name} exported", load_model(checkpoint), note)
        return found[name]

    return of


def check(folder, planted, speaks="vllm", *options):
    """The exit code, and what is found as JSON."""
    with serving(planted, speaks) as url:
        return answer(folder, "--url", url, "--json", *options)


def answer(folder, *options):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = check_server.main(["--canary", str(folder / "canary.json"), *options])
    return code, json.loads(out.getvalue())


def pattern_of(model, **fields):
    return model.with_pattern(dataclasses.replace(model.pattern, **fields))


def decoding(model, **fields):
    """Generated tokens see by another pattern."""
    return Planted(model, decode=dataclasses.replace(model.pattern, **fields))


def kinds(model, letters):
    return pattern_of(model, layer_types=types_of(letters))


def from_middle(t):
    return t + (t >= 32)


# (model, name of the reading, what is planted)
FAULTS = [
    ("rich", "full everywhere", lambda m: Planted(kinds(m, "FFFF"))),
    ("rich", "window everywhere", lambda m: Planted(kinds(m, "wwww"))),
    ("rich", "window - 1", lambda m: Planted(pattern_of(m, sliding_window=5))),
    ("rich", "window + 1", lambda m: Planted(pattern_of(m, sliding_window=7))),
    ("rich", "half the window", lambda m: Planted(pattern_of(m, sliding_window=3))),
    ("rich", "padding", lambda m: Planted(m, padding="seen")),
    ("rich", "rope swapped", lambda m: Planted(with_config(m, rope_layers=("global", "local", "global", "none")))),
    ("rich", "rope global", lambda m: Planted(with_config(m, rope_layers=("global",) * 4))),
    ("rich", "rope unscaled", lambda m: Planted(with_config(m, rope_scaling=None))),
    ("rich", "rope theta", lambda m: Planted(with_config(m, rope_theta=10000.0))),
    ("rich", "without sink_logits", lambda m: Planted(with_config(m, sink_logits=False))),
    ("rich", "without attention_softcap", lambda m: Planted(with_config(m, attention_softcap=None))),
    ("rich", "without logit_softcap", lambda m: Planted(with_config(m, logit_softcap=None))),
    ("rich", "without attention_scale", lambda m: Planted(with_config(m, attention_scale=None))),
    ("rich", "without attention_bias", lambda m: Planted(with_config(m, attention_bias=False))),
    ("rich", "without qk_norm", lambda m: Planted(with_config(m, qk_norm=False))),
    ("rich", "kinds one layer late", lambda m: Planted(kinds(m, "FFww"))),
    ("rich", "layer 1", lambda m: Planted(kinds(m, "FFwF"))),
    ("sink tokens", "full everywhere", lambda m: Planted(kinds(m, "FFFF"))),
    ("sink tokens", "window everywhere", lambda m: Planted(kinds(m, "wwww"))),
    ("sink tokens", "window - 1", lambda m: Planted(pattern_of(m, sliding_window=5))),
    ("sink tokens", "layer 1", lambda m: Planted(kinds(m, "wFFw"))),
    ("sink tokens", "padding", lambda m: Planted(m, padding="seen")),
    ("sink tokens", "sink tokens dropped", lambda m: Planted(pattern_of(m, num_sink_tokens=0))),
    ("sink tokens", "sink tokens - 1", lambda m: Planted(pattern_of(m, num_sink_tokens=2))),
    ("sink tokens", "sink tokens + 1", lambda m: Planted(pattern_of(m, num_sink_tokens=4))),
    ("sink tokens", "positions", lambda m: Planted(m, positions=from_middle)),
    ("sink tokens", "full decode", lambda m: decoding(m, full_attention_decode=True)),
    ("sink tokens", "window - 1 in decode", lambda m: decoding(m, sliding_window=5)),
    ("sink tokens", "window + 1 in decode", lambda m: decoding(m, sliding_window=7)),
    ("sink tokens", "sink tokens dropped in decode", lambda m: decoding(m, num_sink_tokens=0)),
    ("decode", "decode dropped", lambda m: Planted(pattern_of(m, full_attention_decode=False))),
    ("decode", "answer taken over", lambda m: Planted(m, taken_over=True)),
    ("decode", "sink tokens dropped", lambda m: Planted(pattern_of(m, num_sink_tokens=0))),
    ("heads", "full heads dropped", lambda m: Planted(m.with_pattern(tiny_models.make("wwww")))),
    (
        "heads",
        "full heads swapped",
        lambda m: Planted(m.with_pattern(tiny_models.make("hhwh", ((1,), (0,), (), (1,))))),
    ),
    ("heads", "first heads", lambda m: Planted(m.with_pattern(tiny_models.make("hhwh", ((0,), (0,), (), (0,)))))),
    ("heads", "full heads dropped in decode", lambda m: decoding(m, full_kv_heads=())),
    ("gated", "without attention_gate", lambda m: Planted(with_config(m, attention_gate="none"))),
    (
        "gated",
        "without shared_expert_intermediate_size",
        lambda m: Planted(with_config(m, shared_expert_intermediate_size=0)),
    ),
    ("full", "window everywhere", lambda m: Planted(m.with_pattern(tiny_models.make("wwww", sliding_window=16)))),
    ("full", "padding", lambda m: Planted(m, padding="seen")),
    ("own key only", "window + 1", lambda m: Planted(pattern_of(m, sliding_window=2))),
]


def sweep(rows):
    """One model in `make test`, whose readings are fewer to compile, and one in `make test-slow`."""
    when = {"sink tokens": (), "decode": (), "rich": pytest.mark.slow}
    names = ["-".join(part if isinstance(part, str) else part.__name__ for part in row) for row in rows]
    return [
        pytest.param(*row, id=name.removesuffix("-<lambda>"), marks=when.get(row[0], pytest.mark.long))
        for row, name in zip(rows, names, strict=True)
    ]


# Faults that no reading has.
OTHERS = [
    ("rich", "window - 2", lambda m: Planted(pattern_of(m, sliding_window=4))),
    ("rich", "window + 3", lambda m: Planted(pattern_of(m, sliding_window=9))),
    ("rich", "two layers", lambda m: Planted(kinds(m, "FwFw"))),
    ("rich", "rope theta of another size", lambda m: Planted(with_config(m, rope_theta=900.0))),
    (
        "rich",
        "rope scaled by another factor",
        lambda m: Planted(with_config(m, rope_scaling=RopeScaling("linear", 2.0))),
    ),
    ("rich", "softcap of another size", lambda m: Planted(with_config(m, attention_softcap=3.0))),
    ("rich", "two tokens in front", lambda m: Planted(m, before=(7, 8))),
    ("rich", "other weights", lambda m: Planted(with_noise(m, 0.5))),
    ("sink tokens", "rope theta of nearly the right size", lambda m: Planted(with_config(m, rope_theta=11000.0))),
    ("sink tokens", "fewer sink tokens", lambda m: Planted(pattern_of(m, num_sink_tokens=1))),
    ("sink tokens", "positions that begin anew", lambda m: Planted(m, positions=lambda t: t % 16)),
    (
        "sink tokens",
        "layers of full attention with windows in decode",
        lambda m: decoding(m, layer_types=(WINDOW,) * 4),
    ),
    ("heads", "another head", lambda m: Planted(m.with_pattern(tiny_models.make("hhwh", ((0,), (0,), (), (1,)))))),
    ("full", "windows in one layer", lambda m: Planted(m.with_pattern(tiny_models.make("FwFF")))),
]


@pytest.mark.parametrize(("model", "name", "fault"), sweep(FAULTS + OTHERS))
def test_a_planted_fault_is_named(exported, model, name, fault):
    folder, right, _ = exported(model)
    code, found = check(folder, fault(right))
    assert code == check_server.WRONG, found["sentence"]
    assert found["sentence"].startswith("wrong: ")
    assert found["nearest"] == name or (model, name, fault) in OTHERS, found["sentence"]


def five_digits(x):
    return np.vectorize(lambda value: float(f"{value:.5g}"))(x)


def rounded(model):
    return Planted(tiny_models.in_bfloat16(model))


def unrounded(model):
    return Planted(model, also=five_digits)


def padded(model):
    return Planted(model, padding="masked")


HOW = [(s, how) for s in check_server.APIS for how in (unrounded, padded)]
HOW += [("vllm", rounded), ("top", rounded), ("content", unrounded)]


@pytest.mark.parametrize(
    ("model", "speaks", "how"), sweep([(model, speaks, how) for model in MODELS for speaks, how in HOW])
)
def test_a_right_server_is_right_however_it_is_asked(exported, model, speaks, how):
    folder, right, _ = exported(model)
    code, found = check(folder, how(right), speaks)
    assert code == check_server.RIGHT, found["sentence"]
    assert found["asked_by"] == ("top" if speaks == "content" else speaks)
    assert found["sentence"].startswith("right: ")
    assert how is not rounded or found["differences"]["right"] > 1e-4, "it rounds"


@pytest.mark.parametrize(
    ("model", "name"),
    sweep([("sink tokens", "window - 1"), ("sink tokens", "padding"), ("rich", "layer 1"), ("rich", "rope swapped")]),
)
@pytest.mark.parametrize("speaks", ["vllm", "top"])
def test_a_fault_is_named_in_bfloat16(exported, model, name, speaks):
    folder, right, _ = exported(model)
    fault = next(fault for m, n, fault in FAULTS if (m, n) == (model, name))
    planted = fault(right)
    code, found = check(
        folder, dataclasses.replace(planted, model=tiny_models.in_bfloat16(planted.model), also=five_digits), speaks
    )
    assert (code, found["nearest"]) == (check_server.WRONG, name), found["sentence"]


def test_a_server_that_rounds_too_coarsely_cannot_be_told(exported):
    folder, right, _ = exported("sink tokens")
    code, found = check(folder, Planted(right, also=lambda x: x + 0.2 * np.sin(1e4 * x)))
    assert code == check_server.UNKNOWN
    assert "quantised" in found["sentence"]


def test_padding_is_found_in_batches_only(exported):
    folder, right, _ = exported("sink tokens")
    _, found = check(folder, Planted(right, padding="seen"))
    assert (found["single"]["verdict"], found["batch"]["verdict"]) == (check_server.RIGHT, check_server.WRONG)
    assert found["sentence"] == "wrong: the padding of a batch is seen (in a batch; right for single requests)"


def test_who_cannot_be_asked(exported, tmp_path):
    folder, right, _ = exported("sink tokens")
    with serving(Planted(right), "none") as url:
        code, found = answer(folder, "--url", url, "--json", "--api", "echo")
        assert code == check_server.UNKNOWN
        assert "echo is not supported" in found["sentence"]
    code, found = answer(folder, "--url", "http://127.0.0.1:9", "--json")
    assert code == check_server.UNKNOWN
    assert found["sentence"].startswith("cannot tell: http://127.0.0.1:9/v1/models cannot be asked: ")
    for said in (b"[]", b'{"data": [{}]}', b'{"data": [{"id": "m"}], "choices": [1]}'):

        class Says(Requests):
            def do_GET(self, said=said):
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.say(said)

            do_POST = do_GET

        with web_server(Says) as url:
            code, found = answer(folder, "--url", url, "--json")
        assert code == check_server.UNKNOWN
        assert found["sentence"].startswith("cannot tell: ")
    (tmp_path / "canary.json").write_text("{}")
    code, found = answer(tmp_path, "--url", "http://127.0.0.1:9", "--json")
    assert (code, found["sentence"]) == (2, f"cannot tell: {tmp_path / 'canary.json'} is no canary of format 1")
    code, found = answer(folder, "--transformers", "--json")
    assert code == check_server.UNKNOWN
    assert "--transformers needs transformers and torch" in found["sentence"]


def test_the_script_stands_alone(exported):
    """Beside the weights, without this package: it needs numpy and no more."""
    folder, right, _ = exported("sink tokens")
    script = f"""
import runpy, sys
sys.modules["swa_jax"] = None
sys.argv = [{str(folder / "check_server.py")!r}, "--url", sys.argv[1]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    command = [sys.executable, "-I", "-c", script]
    with serving(Planted(kinds(right, "FFFF"))) as url:
        done = subprocess.run([*command, url], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (check_server.WRONG, "")
    assert done.stdout == "Wrong: full attention in every layer.\n"


def test_the_verdict_comes_with_what_the_cache_takes(exported, tmp_path, capsys):
    """An export for a server counts its cache, in the receipt too, and the script repeats it."""
    folder, right, note = exported("sink tokens")
    assert "the log-probabilities that this model gives to 8 texts of up to 64 tokens" in note
    said = r"Together they show \d+ mistakes that servers make\. The hardest to see \(.+\) changes a value by"
    assert re.search(said, note)
    counted = Memory(RICH, {}, 1024, "vllm").steps
    assert counted.startswith("On h100 (--device), at 64 batched tokens")
    canary = json.loads((folder / "canary.json").read_text())
    assert canary["counted"] == ""  # no server
    (tmp_path / "canary.json").write_text(json.dumps(canary | {"counted": counted}))
    with serving(Planted(right)) as url:
        check_server.main(["--canary", str(tmp_path / "canary.json"), "--url", url])
        said = capsys.readouterr().out
        _, found = answer(tmp_path, "--url", url, "--json")
    assert said.endswith(f".\n{counted}\n")
    assert found["counted"] == counted


QWEN3 = ModelConfig(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, tie_word_embeddings=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("window", "budget", "expected"),
    [
        (128, 5e15, Size(8, 24, 512, False, 248)),
        (128, 6e13, Size(4, 8, 320, False, 248)),
        (2048, 5e15, Size(8, 24, 8192, False, 4088)),
        (2048, 6e13, Size(2, 2, 2560, True, 2552)),
        (2048, 1e13, None),
    ],
)
def test_the_cost_of_a_canary_is_bounded(window, budget, expected):
    pattern = AttentionPattern.from_recipe("interleave-1-in-4", QWEN3, sliding_window=window)
    readings = readings_of(QWEN3, pattern, {})
    assert choose_size(QWEN3, pattern, readings, budget) == expected
    smallest = Size(2, 2, 2560, True)
    assert {"right", "padding"} <= {one.name for one in smallest.computed(readings)} < {one.name for one in readings}


def test_an_export_without_a_canary(exported, tmp_path):
    folder, _, _ = exported("sink tokens")
    checkpoint = folder.with_name("sink tokens")
    source = open_checkpoint(checkpoint)
    arguments = (tmp_path, checkpoint, source.pattern, source.hf_config)
    assert write_canary(*arguments, memory=1e3).startswith("No canary: its computation takes 0 GB of memory")
    assert write_canary(*arguments, budget=1e3).startswith("No canary: with probes longer than the window it takes")
    assert [*tmp_path.iterdir()] == []
    note = run("export", checkpoint, tmp_path / "out", "--no-canary")
    assert "canary" not in note
    assert not {"canary.json", "check_server.py"} & {file.name for file in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize(
    ("speaks", "said"),
    [
        (
            "cut",
            r"cannot tell: right, or the next turn takes over .*; an answer leaves the exported model's at token 4",
        ),
        (
            "texts",
            r"cannot tell what is generated: .* does not say the ids of the tokens that it generates \(prompts are",
        ),
    ],
)
def test_answers_that_cannot_be_compared(exported, speaks, said):
    """An answer of three tokens leaves nothing for the next turn to take over."""
    folder, right, _ = exported("decode")
    code, found = check(folder, Planted(right), speaks)
    assert code == check_server.UNKNOWN
    assert re.match(said, found["sentence"]), found["sentence"]
    assert found["single"]["verdict"] == check_server.RIGHT
