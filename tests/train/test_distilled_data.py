"""Training on distilled data: what is learned of it, by cross-entropy and by KL, under LoRA, in bf16, by several
processes."""

import dataclasses
import json
import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from process_groups import ends, free_port
from tiny_models import BYTES, byte_checkpoint, logits_of, make
from training_runs import losses, read_metrics

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import from_dict, to_dict
from swa_jax.data.batches import make_batches
from swa_jax.data.distilled import token_fields
from swa_jax.data.documents import Top
from swa_jax.data.sources import SourceConfig
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.model.decoder import Decoder
from swa_jax.model.lora import trained_and_frozen
from swa_jax.train.config import TrainConfig
from swa_jax.train.loop import train
from swa_jax.train.objectives import totals_of
from swa_jax.train.step import make_loss

K = 4
RNG = np.random.default_rng(0)
LENGTH = 24


def write_samples(file) -> None:
    """Random prompts and replies, with a teacher that knows little."""
    with file.open("w") as out:
        for number in range(12):
            prompt, reply = RNG.integers(1, 257, 5 + number % 7), RNG.integers(1, 257, 3 + number % 4)
            top = np.stack([RNG.permutation(257)[:K] for _ in reply])
            shares = np.sort(RNG.dirichlet(np.ones(K + 1), len(reply))[:, :K])[:, ::-1]
            fields = token_fields(prompt, reply, Top(top, np.log(shares)))
            out.write(json.dumps({"prompt": number, "sample": 0, "text": "-"} | fields) + "\n")


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    file = tmp_path_factory.mktemp("samples") / "samples.jsonl"
    write_samples(file)
    return file


def settings(samples, tokenizer, **changes):
    source = {"kind": "distilled", "files": [str(samples)]}
    stage = {"steps": 3, "sequence_length": LENGTH, "batch_size": 4, "data": [source]}
    return {
        "output": "-",
        "tokenizer": str(tokenizer),
        "model": to_dict(BYTES),
        "stages": [stage],
        "pattern": "window",
        "sliding_window": 4,
    } | changes


@pytest.fixture(scope="module")
def batch(samples, byte_tokenizer):
    source = SourceConfig(kind="distilled", files=(str(samples),))
    return next(
        make_batches([source], load_tokenizer(byte_tokenizer), length=LENGTH, batch_size=4, seed=0, top_logprobs=K)
    )


@pytest.fixture(scope="module")
def model():
    return Decoder(dataclasses.replace(BYTES, initializer_range=0.3), make("ww", sliding_window=4), rngs=nnx.Rngs(0))


def loss_and_metrics(model, config, batch):
    trained, frozen = trained_and_frozen(model)
    totals = totals_of(batch["segment_ids"], jnp.roll(batch["weights"], -1, 1))
    return jax.jit(make_loss(model, config, None))(trained, frozen, batch, totals, None)


def test_only_replies_are_learned(batch, samples):
    """Every reply token has weight and its log-probabilities, no prompt token has any."""
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    seen = 0
    for row in range(4):
        for segment in range(1, batch["segment_ids"][row].max() + 1):
            here = batch["segment_ids"][row] == segment
            boundary = batch["full_from"][row, segment - 1]
            weights, tokens = batch["weights"][row][here], batch["tokens"][row][here]
            assert (weights[:boundary] == 0).all()
            assert (weights[boundary:] == 1).all()
            top = Top(batch["top_tokens"][row][here][boundary:], batch["top_logprobs"][row][here][boundary:])
            fields = token_fields(tokens[:boundary], tokens[boundary:], top)
            assert any(fields.items() <= line.items() for line in lines)
            seen += 1
    assert seen >= 4
    assert (batch["weights"][batch["segment_ids"] == 0] == 0).all()


@pytest.mark.parametrize("top_k", [None, K])
def test_the_loss_is_that_of_the_reply_tokens(batch, samples, byte_tokenizer, model, top_k):
    """Cross-entropy, or KL over the K likeliest and the rest as one class, by hand at every reply token."""
    config = from_dict(TrainConfig, settings(samples, byte_tokenizer, distill=top_k and {"top_k": top_k}))
    if top_k is None:
        batch = {name: x for name, x in batch.items() if not name.startswith("top_")}
    loss, metrics = loss_and_metrics(model, config, batch)
    logits = logits_of(model, batch["tokens"], segment_ids=batch["segment_ids"])
    q = np.asarray(jax.nn.softmax(logits), np.float64)
    nll, kl = [], []
    for row, place in np.argwhere(batch["weights"] > 0):
        nll.append(-np.log(q[row, place - 1, batch["tokens"][row, place]]))
        if top_k is not None:
            p = np.exp(np.float64(batch["top_logprobs"][row, place]))
            mine = q[row, place - 1, batch["top_tokens"][row, place]]
            p, mine = np.append(p, 1 - p.sum()), np.append(mine, 1 - mine.sum())
            kl.append((p * np.log(p / mine)).sum())
    np.testing.assert_allclose(metrics["loss"], np.mean(nll), rtol=1e-4)
    np.testing.assert_allclose(loss, np.mean(nll if top_k is None else kl), rtol=1e-3)
    assert ("divergence" in metrics) == (top_k is not None)


def test_kl_is_of_distilled_data_alone(samples, byte_tokenizer):
    given = settings(samples, byte_tokenizer, distill={"top_k": 2})
    given["stages"][0]["data"].append({"kind": "repeats"})
    with pytest.raises(ConfigError, match="which a source of kind 'repeats' has not: train on kind 'distilled' alone"):
        from_dict(TrainConfig, given)
    with pytest.raises(ConfigError, match=r"'distill\.top_k' must be at least 1"):
        from_dict(TrainConfig, settings(samples, byte_tokenizer, distill={"top_k": 0}))


@pytest.mark.slow
def test_lora_in_bf16_by_kl_goes_on_where_it_was_stopped(samples, byte_tokenizer, tmp_path):
    """Pieces of a batch add up, under full-attention decode too; held-out samples are measured."""
    base = byte_checkpoint(tmp_path, byte_tokenizer, make("ww", sliding_window=4))
    pattern = tmp_path / "pattern.json"
    make("ww", sliding_window=4, full_attention_decode=True).to_json(pattern)
    lora = {"rank": 4, "alpha": 8, "dropout": 0.0, "targets": ["q_proj", "v_proj"]}
    found = {}
    for name, changes in {"whole": {}, "pieces": {"accumulate": 2}, "long": {"steps": 30}}.items():
        given = settings(
            samples, byte_tokenizer, output=str(tmp_path / name), init_from=str(base), lora=lora,
            distill={"top_k": K}, bfloat16=name == "long", pattern=str(pattern),
            optimizer={"learning_rate": 0.02, "warmup_steps": 1},
            validate_every=3, validation_batches=1,
        )  # fmt: skip
        del given["model"], given["sliding_window"]
        given["stages"][0] |= changes
        given["stages"][0]["data"][0]["held_out"] = 0.3
        train(from_dict(TrainConfig, given), quiet=True)
        found[name] = [line["divergence"] for line in read_metrics(tmp_path / name) if "divergence" in line]
    np.testing.assert_allclose(found["pieces"], found["whole"], rtol=1e-5)
    assert np.mean(found["long"][-5:]) < 0.9 * found["long"][0]
    assert "validation_loss" in (tmp_path / "whole" / "metrics.jsonl").read_text()


@pytest.mark.long
def test_several_processes_learn_what_one_does(launch, samples, byte_tokenizer, tmp_path):
    """LoRA in bf16 by KL on a mesh that splits rows, tokens' vocabulary and weights."""
    base = byte_checkpoint(
        tmp_path, byte_tokenizer, make("ww", sliding_window=4), vocab_size=258, num_key_value_heads=2
    )
    given = settings(
        samples,
        byte_tokenizer,
        init_from=str(base),
        distill={"top_k": K},
        bfloat16=True,
        mesh={"data": 2, "tensor": 2},
        lora={"rank": 4, "dropout": 0.0},
        optimizer={"learning_rate": 0.01, "warmup_steps": 1},
    )
    del given["model"]
    for count in (1, 2):
        port, processes = free_port(), []
        environment = os.environ | {
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={4 // count}",
            "JAX_PLATFORMS": "cpu",
        }
        file = tmp_path / f"{count}.yaml"
        file.write_text(yaml.safe_dump(given | {"output": str(tmp_path / f"run-{count}")}))
        for i in range(count):
            command = [sys.executable, "-m", "swa_jax.cli", "train", str(file)]
            if count > 1:
                command += ["--processes", "2", "--process-id", str(i), "--coordinator", f"127.0.0.1:{port}"]
                command += ["--timeout", "300"]
            processes.append(launch(command, env=environment))
        assert ends(processes, 900) == [(0, "")] * count
    np.testing.assert_allclose(losses(tmp_path / "run-2"), losses(tmp_path / "run-1"), rtol=1e-5)
    for line in read_metrics(tmp_path / "run-2"):
        assert line["divergence"] > 0
