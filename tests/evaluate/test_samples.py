"""Samples that are known are not computed again, and never taken for others."""

import dataclasses
import json

import numpy as np
import pytest
from command_line import fails, run
from tiny_models import BYTES, byte_checkpoint, make

from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.evaluate import Example, generated_answers, nll
from swa_jax.evaluate.generated_answers import generate_answers
from swa_jax.evaluate.nll import score_answers
from swa_jax.evaluate.ruler import string_match_part
from swa_jax.evaluate.samples import Samples

LAYERS = BYTES.num_hidden_layers


@pytest.fixture(scope="module")
def model():
    from flax import nnx

    from swa_jax.model.decoder import Decoder

    return Decoder(BYTES, make("F" * LAYERS, sliding_window=None), rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer):
    return load_tokenizer(byte_tokenizer)


def examples(count=7):
    rng = np.random.default_rng(0)
    return [Example(rng.integers(1, 200, size=20).tolist(), [5, 6], ["x"]) for _ in range(count)]


class Stop(Exception):
    pass


def stop_after(calls):
    def advance(_):
        nonlocal calls
        calls -= 1
        if calls == 0:
            raise Stop

    return advance


@pytest.fixture
def runs(monkeypatch):
    """How many batches went through a model."""
    counts = {"answer": 0, "likelihood": 0}

    def counted(kind, function):
        def call(*arguments, **options):
            counts[kind] += 1
            return function(*arguments, **options)

        return call

    monkeypatch.setattr(generated_answers, "_run_batch", counted("answer", generated_answers._run_batch))
    monkeypatch.setattr(nll, "score_batch", counted("likelihood", nll.score_batch))
    return counts


def answer(model, tokenizer, asked, samples, **options):
    return generate_answers(
        model, tokenizer, asked, max_new_tokens=4, batch_size=2, timed=False, samples=samples, **options
    )


def test_an_interrupted_measurement_goes_on(model, tokenizer, runs, tmp_path):
    file, asked = tmp_path / "samples.jsonl", examples()
    expected = answer(model, tokenizer, asked, Samples())
    likelihood = score_answers(model, asked, batch_size=2)
    whole = dict(runs)
    assert whole == {"answer": 4, "likelihood": 4}
    with pytest.raises(Stop):
        answer(model, tokenizer, asked, Samples(file), advance=stop_after(2))
    with pytest.raises(Stop):
        score_answers(model, asked, batch_size=2, samples=Samples(file), advance=stop_after(3))
    with file.open("a") as stream:
        stream.write('{"key": "0')  # what a kill leaves
    before = dict(runs)
    again = answer(model, tokenizer, asked, Samples(file))
    assert again.texts == expected.texts
    np.testing.assert_array_equal(again.scores, expected.scores)
    assert again.kv_cache_bytes == expected.kv_cache_bytes
    scores = score_answers(model, asked, batch_size=2, samples=Samples(file))
    np.testing.assert_array_equal(scores.nll, likelihood.nll)
    np.testing.assert_array_equal(scores.right, likelihood.right)
    assert {kind: runs[kind] - before[kind] for kind in runs} == {"answer": 2, "likelihood": 1}
    before = dict(runs)
    timed = generate_answers(model, tokenizer, asked, max_new_tokens=4, batch_size=2, samples=Samples(file))
    assert runs["answer"] == before["answer"] + 2  # of what is known: one batch compiles, and is then timed
    assert timed.prefill_seconds > 0
    lines = [json.loads(line) for line in file.read_text().splitlines() if not line.endswith('"0')]
    assert len(lines) == 14
    assert {line["kind"] for line in lines} == {"answer", "likelihood"}


def test_nothing_is_taken_for_something_else(model, tokenizer, runs, tmp_path):
    samples, asked = Samples(tmp_path / "samples.jsonl"), examples(2)
    answer(model, tokenizer, asked, samples.under("one"))
    others = [
        ("another model", asked, samples.under("two"), {}),
        ("another reference", [dataclasses.replace(e, references=["y"]) for e in asked], samples.under("one"), {}),
        ("another order", asked[::-1], samples.under("one"), {}),
        ("one of two", asked[:1], samples.under("one"), {}),
        ("other end tokens", asked, samples.under("one"), {"stop_tokens": [9]}),
        ("another score", asked, samples.under("one"), {"score": string_match_part}),
    ]
    for what, some, known, options in others:
        before = runs["answer"]
        answer(model, tokenizer, some, known, **options)
        assert runs["answer"] == before + 1, what
    before, file = runs["answer"], tmp_path / "samples.jsonl"
    answer(model, tokenizer, asked, Samples(file).under("one"))
    assert runs["answer"] == before
    file.write_text("\n".join(file.read_text().split("\n")[1:]))  # a row of the first batch is lost
    answer(model, tokenizer, asked, Samples(file).under("one"))
    assert runs["answer"] == before + 1


def test_the_command_goes_on(model, byte_tokenizer, tmp_path, monkeypatch):
    checkpoint = byte_checkpoint(tmp_path / "model", byte_tokenizer, model.pattern, max_position_embeddings=512)
    needles = [
        "evaluate", "needles", checkpoint, "--examples", 4, "--length", 256, "--batch-size", 2,
        "--pattern", "full", "--pattern", "window", "--window", 32,
    ]  # fmt: skip
    run(*needles, "--out", tmp_path / "whole")
    whole = json.loads((tmp_path / "whole" / "results.json").read_text())
    run_batch, left = generated_answers._run_batch, [4]

    def interrupted(*arguments):
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return run_batch(*arguments)

    monkeypatch.setattr(generated_answers, "_run_batch", interrupted)
    out = tmp_path / "out"
    with pytest.raises(AssertionError):
        run(*needles, "--out", out)
    monkeypatch.setattr(generated_answers, "_run_batch", run_batch)
    assert json.loads((out / "results.json").read_text())["unfinished"] == ["needles"]
    said = fails(*needles, "--examples", 5, "--out", out)
    assert "holds an interrupted `evaluate needles` of other content (examples was 4 there and is 5" in said
    kept = (out / "samples.jsonl").read_text()
    found = kept.count('"key"')
    printed = run(*needles, "--out", out)
    assert f"{out / 'samples.jsonl'}: found {found} of 16 samples here, doing {16 - found}\n" in printed
    lines = (out / "samples.jsonl").read_text()
    assert lines.startswith(kept)
    keys = [line["key"] for line in map(json.loads, lines.splitlines())]
    assert len(keys) == len(set(keys)) == 2 * 2 * 4, "nothing that was known is there twice"
    results = json.loads((out / "results.json").read_text())
    assert "unfinished" not in results
    timed = {"prefill_seconds", "decode_tokens_per_second"}
    for mine, other in zip(results["rows"], whole["rows"], strict=True):
        assert {k: v for k, v in mine.items() if k not in timed} == {k: v for k, v in other.items() if k not in timed}
    table, _, rest = run(*needles, "--out", out).partition(f"{out} has these results already\n")
    assert table in printed
    assert not rest
    assert (out / "samples.jsonl").read_text() == lines
    assert json.loads((out / "results.json").read_text()) == results
    said = fails(*needles, "--examples", 5, "--out", out)
    assert said.startswith(f"{out} holds results of `evaluate needles` of other content (examples was 4 there and is 5")
