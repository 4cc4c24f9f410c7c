"""Answer NLL, perplexity and generated needle accuracy, on a tiny random model."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from characters import Characters
from flax import nnx
from tiny_models import WIDER

from pallas_kernels.math.spec import NEVER
from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import bootstrap
from swa_jax.evaluate import Example, generate_answers, needle_accuracy, needle_examples, perplexity, score_answers
from swa_jax.evaluate.nll import answer_batches, score_batch
from swa_jax.model.cache import cache_bytes
from swa_jax.model.decoder import Decoder
from swa_jax.model.generate import generate
from swa_jax.model.pattern import AttentionPattern

VOCABULARY = 128
CONFIG = dataclasses.replace(
    WIDER, vocab_size=VOCABULARY, qk_norm=True, tie_word_embeddings=True, initializer_range=0.3
)


class Ascii(Characters):
    """Its ids are those of the model's vocabulary."""

    def encode(self, text: str) -> list[int]:
        return [min(ord(c), VOCABULARY - 1) for c in text]


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(CONFIG, AttentionPattern.from_recipe("full", 4, sliding_window=8), rngs=nnx.Rngs(0))


def recipe(name: str) -> AttentionPattern:
    return AttentionPattern.from_recipe(name, 4, sliding_window=8)


def examples(lengths, answers, seed=0) -> list[Example]:
    rng = np.random.default_rng(seed)
    draw = lambda n: rng.integers(0, VOCABULARY, n).tolist()  # noqa: E731
    return [Example(draw(n), draw(a), ["?"]) for n, a in zip(lengths, answers, strict=True)]


@functools.partial(jax.jit, static_argnums=0)
def forward(graph, weights, tokens, full_from):
    return nnx.merge(graph, weights)(tokens, full_from=full_from)


def token_nll(model: Decoder, tokens: list[int], full_from: int = NEVER) -> np.ndarray:
    """NLL of tokens 1, 2, ... from the whole logits of one row, padded at its end to one length for all."""
    row = np.zeros((1, 64), np.int32)
    row[0, : len(tokens)] = tokens
    logits = np.asarray(forward(*nnx.split(model), row, jnp.array([full_from]))[0], np.float64)
    top = logits.max(1)
    log_z = np.log(np.exp(logits - top[:, None]).sum(1)) + top
    return (log_z - np.take_along_axis(logits, np.roll(row, -1).T, 1)[:, 0])[: len(tokens) - 1]


def nll_by_hand(model: Decoder, example: Example, full_from: int) -> float:
    return float(token_nll(model, example.prompt + example.answer, full_from)[len(example.prompt) - 1 :].mean())


@pytest.mark.parametrize("name", ["window", "interleave-1-in-2+fa-decode", "window+fa-decode+last-tokens=3"])
def test_answer_nll_is_that_of_each_example_alone(model, name):
    # Unequal prompts and answers in batches of 2: padding and filling up must not be seen.
    mixed = examples([40, 21, 33, 25, 37], [5, 9, 1, 3, 7])
    patterned = model.with_pattern(recipe(name))
    last = {"window": None, "window+fa-decode+last-tokens=3": 3}.get(name, 0)
    got = score_answers(patterned, mixed, batch_size=2).nll
    want = [nll_by_hand(patterned, e, NEVER if last is None else len(e.prompt) - last) for e in mixed]
    np.testing.assert_allclose(got, want, rtol=2e-5)


def test_full_attention_decode_changes_the_answer_queries(model):
    def both(some):
        return [score_answers(model, some, pattern=recipe(name)).nll for name in ("window", "window+fa-decode")]

    some = examples([30, 41], [4, 6])
    off, on = both(some)
    assert np.abs(on - off).min() > 1e-3
    # The first label is predicted by a prompt query, so an answer of one token does not change.
    off, on = both([dataclasses.replace(e, answer=e.answer[:1]) for e in some])
    np.testing.assert_allclose(on, off, rtol=1e-5)


def test_patterns_of_one_window_share_a_compilation(model):
    some = examples([30, 41, 35], [4, 6, 5], seed=3)
    before = None
    for name in ("window", "full", "interleave-1-in-4", "interleave-1-in-2+fa-decode", "layers:0,3"):
        score_answers(model.with_pattern(recipe(name)), some)
        score_answers(model, some, pattern=recipe(name))
        if before is None:
            before = score_batch._cache_size()
    assert score_batch._cache_size() == before


def test_without_a_value_right_means_that_greedy_generation_gives_the_answer(model):
    prompts = [e.prompt for e in examples([30, 41, 35], [1, 1, 1], seed=4)]
    windowed = model.with_pattern(recipe("interleave-1-in-2+fa-decode"))
    answers = generate(windowed, prompts, max_new_tokens=6)
    right = [Example(p, a, ["?"]) for p, a in zip(prompts, answers, strict=True)]
    wrong = [dataclasses.replace(e, answer=[*e.answer[:-1], (e.answer[-1] + 1) % VOCABULARY]) for e in right]
    assert score_answers(windowed, right + wrong).right.tolist() == [True] * 3 + [False] * 3


def test_an_answer_is_right_by_its_value(model):
    """The sentence around it is given, and may be one that the model would not write."""
    windowed = model.with_pattern(recipe("interleave-1-in-2"))
    asked, unlikely = examples([30, 41, 35], [3, 3, 3], seed=5), []
    continued = generate(windowed, [e.prompt + e.answer for e in asked], max_new_tokens=5)
    for example, (*said, after) in zip(asked, continued, strict=True):
        # A sentence of 3 tokens, the model's own 4, and 2 more that it would not write.
        unlikely.append([*example.answer, *said, *[(after + 1) % VOCABULARY] * 2])
    by_value = [Example(e.prompt, a, ["?"], {}, (3, 4, 5, 6)) for e, a in zip(asked, unlikely, strict=True)]
    scores = score_answers(windowed, by_value)
    assert scores.right.all()
    whole = score_answers(windowed, [dataclasses.replace(e, value=None) for e in by_value])
    assert not whole.right.any()
    np.testing.assert_array_equal(scores.nll, whole.nll)  # the loss is of the whole answer
    off = [dataclasses.replace(e, value=(3, 7)) for e in by_value]
    wrong = [dataclasses.replace(e, answer=[*e.answer[:6], (e.answer[6] + 1) % VOCABULARY]) for e in by_value]
    assert not score_answers(windowed, off + wrong).right.any()


@pytest.mark.parametrize(("prompt", "answer"), [([], [1]), ([1], [])])
def test_empty_prompts_and_answers_are_refused(model, prompt, answer):
    with pytest.raises(ValueError, match=r"examples\[1\] has an empty"):
        score_answers(model, [Example([1], [2], []), Example(prompt, answer, [])])
    with pytest.raises(ValueError, match="examples is empty"):
        score_answers(model, [])


# ---- perplexity ----


@pytest.mark.parametrize("length", [2, 25, 26, 61])
def test_chunked_perplexity_scores_every_token_once_with_its_chunk_as_context(model, length):
    text = np.random.default_rng(1).integers(0, VOCABULARY, length).tolist()
    got = perplexity(model, text, context=24, batch_size=2)
    want = np.concatenate([token_nll(model, text[i : i + 25]) for i in range(0, length - 1, 24)])
    np.testing.assert_allclose(got.token_nll, want, rtol=1e-4, atol=1e-5)
    assert got.num_tokens == length - 1
    assert got.perplexity == pytest.approx(np.exp(want.mean()), rel=1e-4)
    passes = np.split(got.token_nll, range(24, length - 1, 24))
    tokens = [len(one) for one in passes]
    assert got.nll == bootstrap([one.mean() for one in passes], weights=tokens)
    assert got.nll.mean == pytest.approx(got.token_nll.mean(), rel=1e-6)


@pytest.mark.parametrize("start", [[3], [3, 5, 7]])
@pytest.mark.parametrize("length", [2, 24, 25, 61])
def test_start_tokens_stand_before_every_pass_and_are_not_scored(model, length, start):
    text = np.random.default_rng(1).integers(0, VOCABULARY, length).tolist()
    got = perplexity(model, text, context=24, start=start, batch_size=2)
    size = 25 - len(start)  # a pass of 24 tokens also predicts the one after it
    passes = [token_nll(model, start + text[i : i + size])[len(start) - 1 :] for i in range(0, length, size)]
    np.testing.assert_allclose(got.token_nll, np.concatenate(passes), rtol=1e-4, atol=1e-5)
    assert got.num_tokens == length
    assert got.nll.mean == pytest.approx(got.token_nll.mean(), rel=1e-6)


def test_evaluation_window_is_the_patterns(model):
    text = np.random.default_rng(3).integers(0, VOCABULARY, 40).tolist()
    full = perplexity(model, text, context=24).token_nll[:24]
    windowed = perplexity(model.with_pattern(recipe("window")), text, context=24).token_nll[:24]
    np.testing.assert_allclose(full[:7], windowed[:7], rtol=1e-4)  # a window of 8 holds the first 8 tokens
    assert np.abs(full[8:] - windowed[8:]).max() > 1e-2


def test_perplexity_refuses_what_it_cannot_score(model):
    with pytest.raises(ConfigError, match="at least 2 ids"):
        perplexity(model, [1], context=8)
    with pytest.raises(ConfigError, match=r"context is 1 tokens, all of which are start tokens.*at least 2"):
        perplexity(model, [1, 2, 3], context=1, start=[4, 5])


# ---- generated answers ----


@pytest.fixture(scope="module")
def needles() -> list[Example]:
    return needle_examples(Ascii(), length=220, num_examples=5, haystack="All work and no play. " * 9, seed=1)


def test_generated_answers_are_those_of_generate_and_scored_by_their_text(model, needles):
    windowed = model.with_pattern(recipe("interleave-1-in-2"))
    prompts = [e.prompt for e in needles]
    rows = [generate(windowed, prompts[i : i + 2], max_new_tokens=6) for i in (0, 2, 3)]
    texts = [Ascii().decode(row) for row in (*rows[0], *rows[1], rows[2][1])]
    # Two of five references are what the model says: with a fifth example left over, the last batch is filled up.
    known = [dataclasses.replace(e, references=[texts[i]] if i in (1, 4) else ["no"]) for i, e in enumerate(needles)]
    answers = generate_answers(windowed, Ascii(), known, max_new_tokens=6, batch_size=2)
    assert answers.texts == texts
    assert answers.scores.tolist() == [0, 1, 0, 0, 1]
    assert needle_accuracy(windowed, Ascii(), known, max_new_tokens=6, batch_size=2).tolist() == [0, 1, 0, 0, 1]
    assert answers.kv_cache_bytes == cache_bytes(CONFIG, windowed.pattern, 1, answers.max_length, 4)


def test_rows_of_text_do_not_widen_the_answers_of_others():
    lengths = [3, 300, 5, 270, 4]
    batches = list(answer_batches([Example([1] * 20, [2] * n, []) for n in lengths], 2))
    assert [index.tolist() for index, _ in batches] == [[0, 4], [2], [3, 1]]
    assert [batch.labels.shape for _, batch in batches] == [(2, 5), (2, 5), (2, 300)]
    assert [batch.tokens.shape[1] for _, batch in batches] == [64, 64, 320]


def test_a_single_batch_is_timed_warm(model, needles):
    windowed = model.with_pattern(recipe("interleave-1-in-2"))
    answers = generate_answers(windowed, Ascii(), needles[:2], max_new_tokens=6, batch_size=8)
    assert answers.batch_size == 2
    assert 0 < answers.prefill_seconds < 5
    assert answers.decode_tokens_per_second > 0
    untimed = generate_answers(windowed, Ascii(), needles[:2], max_new_tokens=6, timed=False)
    assert np.isnan(untimed.prefill_seconds)
