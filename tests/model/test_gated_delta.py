"""Hybrids with linear layers: the delta rule by itself, and whole models against transformers (tests/golden/linear)."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import swa_jax
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.model.cache import allocate, cache_bytes, cache_layouts
from swa_jax.model.decoder import Decoder
from swa_jax.model.engine import Engine
from swa_jax.model.gated_delta import CHUNK, Updates, chunked, recurrent
from swa_jax.model.layer_types import FULL, LINEAR, WINDOW
from swa_jax.model.pattern import AttentionPattern

GOLDEN = Path(__file__).parents[1] / "golden" / "linear"
CASES = sorted(folder.name for folder in GOLDEN.iterdir())
TOLERANCE = 1e-4
WINDOW_SIZE = 8


def updates(length: int, *, rows: int = 2, heads: int = 3, width: int = 8, value: int = 6) -> tuple[Updates, jax.Array]:
    """Tokens of which some begin a document, and a state before them."""
    rng = np.random.default_rng(length)
    q, k = (rng.normal(size=(rows, heads, length, width)) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, state = rng.normal(size=(rows, heads, length, value)), rng.normal(size=(rows, heads, width, value))
    g, b = -2 * rng.random((rows, heads, length)), rng.random((rows, heads, length))
    runs = np.cumsum(rng.random((rows, length)) < 0.03, axis=1)
    given = (jnp.asarray(x, jnp.float32) for x in (q, k, v, g, b))
    return Updates(*given, jnp.asarray(runs, jnp.int32)), jnp.asarray(state, jnp.float32)


def by_hand(given: Updates, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The delta rule as the paper writes it, S [Dv, Dk], in f64: S (a (I - b k k^T)) + b v k^T."""
    q, k, v, g, b, runs = (np.asarray(x, np.float64) for x in given)
    said, behind = np.zeros(v.shape), np.zeros(state.shape)
    for row, head in np.ndindex(*v.shape[:2]):
        s, run = np.asarray(state, np.float64)[row, head].T, 0
        for t in range(v.shape[2]):
            key, value, step = k[row, head, t], v[row, head, t], b[row, head, t]
            s, run = s * (runs[row, t] == run), runs[row, t]
            s = np.exp(g[row, head, t]) * s @ (np.eye(len(key)) - step * np.outer(key, key)) + step * np.outer(value, key)
            said[row, head, t] = s @ q[row, head, t]
        behind[row, head] = s.T
    return said, behind


@pytest.mark.parametrize("length", [1, CHUNK, 2 * CHUNK + 5])
@pytest.mark.parametrize("rule", [recurrent, chunked])
def test_the_delta_rule_is_the_papers(rule, length):
    given, state = updates(length)
    for found, expected in zip(jax.jit(rule)(given, state), by_hand(given, state), strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_gradients_of_chunks_are_those_of_tokens():
    given, state = updates(CHUNK + 9)

    def gradients(rule):
        def total(numbers, state):
            said, behind = rule(Updates(*numbers, given.runs), state)
            return jnp.sum(jnp.sin(said)) + jnp.sum(jnp.cos(behind))

        return jax.jit(jax.grad(total, argnums=(0, 1)))(tuple(given[:5]), state)

    for one, other in zip(*(jax.tree.leaves(gradients(rule)) for rule in (recurrent, chunked)), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


@functools.cache
def golden(case: str) -> dict[str, np.ndarray]:
    return load_file(GOLDEN / case / "golden.safetensors")


@pytest.fixture(scope="module")
def load(tmp_path_factory):
    folder = tmp_path_factory.mktemp("linear")

    @functools.cache
    def imported(case: str) -> Decoder:
        return swa_jax.load_model(import_model(GOLDEN / case, folder / case))

    return imported


@nnx.jit
def logits(model: Decoder, tokens, segment_ids=None):
    return model(tokens, segment_ids=segment_ids)


def windowed(model: Decoder) -> Decoder:
    return model.with_pattern(AttentionPattern.everywhere(WINDOW, model.config, WINDOW_SIZE))


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(load, case):
    """With the layers of config.json, and with windows in the attention layers, by a mask that transformers was given."""
    model, expected = load(case), golden(case)
    assert {*model.pattern.layer_types} == {FULL, LINEAR}
    np.testing.assert_allclose(logits(model, expected["tokens"]), expected["logits"], rtol=0, atol=TOLERANCE)
    found = logits(windowed(model), expected["tokens"])
    np.testing.assert_allclose(found, expected["logits_window"], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_a_prompt_goes_on_as_in_transformers(load, case):
    expected = load_file(GOLDEN / case / "generation.safetensors")
    rows = zip(expected["tokens"], expected["attention_mask"], strict=True)
    prompts = [row[real == 1].tolist() for row, real in rows]
    model, new = load(case), expected["new_tokens"]
    assert len({len(prompt) for prompt in prompts}) == 2
    assert [list(reply) for reply in swa_jax.generate(model, prompts, max_new_tokens=new.shape[1])] == new.tolist()
