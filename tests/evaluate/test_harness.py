"""lm-evaluation-harness on our models: the numbers are those of our own evaluator. Skipped without lm-eval."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest
from flax import nnx
from tiny_models import BYTES, make

from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import accuracy_interval, bootstrap
from swa_jax.checkpoint.hf_import import import_model
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.evaluate import Example, score_answers
from swa_jax.model.decoder import Decoder
from swa_jax.model.generate import generate
from swa_jax.model.pattern import AttentionPattern

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed (extra [eval])")

from swa_jax.evaluate.harness import HarnessModel, rolling_windows, run_harness
from swa_jax.model.window import Window


def requests(*arguments):
    return [SimpleNamespace(args=args) for args in arguments]


@pytest.fixture(scope="module")
def lm(byte_tokenizer) -> HarnessModel:
    config = dataclasses.replace(BYTES, max_position_embeddings=64)
    model = Decoder(config, make("Fw", sliding_window=8), rngs=nnx.Rngs(0))
    return HarnessModel(model, load_tokenizer(byte_tokenizer.parent), batch_size=2)


def test_loglikelihoods_are_sums_of_our_answer_losses(lm: HarnessModel) -> None:
    pairs = [("All that is gold", " does not"), ("a  ", "b"), ("", "glitter"), ("x", ""), ("One two", " three")]
    got = lm.loglikelihood(requests(*pairs))
    encode, eos = lm.tokenizer.encode, lm.tokenizer.eos_id
    split = [(encode("All that is gold"), encode(" does not")), (encode("a"), encode("  b"))]
    split += [([eos], encode("glitter")), (encode("One two"), encode(" three"))]
    scores = score_answers(lm.model, [Example(p, a, []) for p, a in split])
    want = [-nll * len(a) for nll, (_, a) in zip(scores.nll, split, strict=True)]
    np.testing.assert_allclose([got[i][0] for i in (0, 1, 2, 4)], want, rtol=1e-5)
    assert got[3] == (0.0, True)
    greedy = lm.tokenizer.decode(generate(lm.model, [encode("gold")], max_new_tokens=1)[0])
    if greedy.isascii() and greedy:
        assert lm.loglikelihood(requests(("gold", greedy)))[0][1]


def test_a_chat_brings_its_start_tokens(lm: HarnessModel, monkeypatch) -> None:
    asked = []

    def text(messages, add_generation_prompt):
        asked.append(add_generation_prompt)
        return "".join(f"{message['role']}: {message['content']};" for message in messages)

    monkeypatch.setattr(lm.tokenizer, "start_ids", [1])
    chat = HarnessModel(lm.model, lm.tokenizer, chat=text)
    message = [{"role": "user", "content": "hi"}]
    assert chat.apply_chat_template(message) == "user: hi;"
    chat.apply_chat_template(message, add_generation_prompt=False)
    assert asked == [True, False]
    assert chat._context("user: hi;") == lm.tokenizer.encode("user: hi;")
    assert lm._context("user: hi;") == [1, *lm.tokenizer.encode("user: hi;")]
    assert isinstance(chat.tokenizer_name, str)


def test_whole_texts_predict_every_token_once(lm: HarnessModel) -> None:
    assert rolling_windows(range(10), 99, 4) == [([99], [0, 1, 2, 3]), ([3], [4, 5, 6, 7]), ([5, 6, 7], [8, 9])]
    assert rolling_windows([], 99, 4) == []
    short, long = "It goes on", "It goes ever on and on. " * 6
    got = lm.loglikelihood_rolling(requests((short,), (long,), ("",)))
    eos, tokens = lm.tokenizer.eos_id, lm.tokenizer.encode(long)
    windows = [(p, a) for p, a in rolling_windows(tokens, eos, 64)]
    assert [token for _, a in windows for token in a] == tokens
    plain = lm.model.pattern.with_window(Window(full_decode=False))
    nll = [score_answers(lm.model, [Example(p, a, [])], pattern=plain).nll[0] * len(a) for p, a in windows]
    assert got[1] == pytest.approx(-sum(nll), rel=1e-5)
    whole = score_answers(lm.model, [Example([eos], lm.tokenizer.encode(short), [])]).nll[0]
    assert got[0] == pytest.approx(-whole * len(short), rel=1e-5)
    assert got[2] == 0


def test_a_start_token_that_the_tokenizer_does_not_add_comes_before_a_text_without_context(lm, tmp_path):
    """lm-evaluation-harness: `HFLM.prefix_token_id` is the start token if there is one, or else the end token."""
    (tmp_path / "tokenizer.json").write_text(lm.tokenizer.backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "a"}}))
    named = HarnessModel(lm.model, load_tokenizer(tmp_path), batch_size=2)
    (bos,) = named.tokenizer.encode("a")
    assert (named.tokenizer.bos_id, named.tokenizer.start_ids) == (bos, [])
    text = "It goes on"
    whole = Example([bos], named.tokenizer.encode(text), [])
    want = -score_answers(lm.model, [whole]).nll[0] * len(text)
    assert named.loglikelihood_rolling(requests((text,))) == [pytest.approx(want, rel=1e-5)]
    assert named.loglikelihood(requests(("", text)))[0][0] == pytest.approx(want, rel=1e-5)
    assert named._context("x") == named.tokenizer.encode("x")


def test_texts_end_at_the_first_until(lm: HarnessModel) -> None:
    prompts = ["One", "Two three", "Four"]
    plain = [
        lm.tokenizer.decode(row)
        for row in generate(
            lm.model, [lm.tokenizer.encode(p) for p in prompts], max_new_tokens=12, stop_tokens=[lm.tokenizer.eos_id]
        )
    ]
    stop = plain[1][3:5]
    options = [{"max_gen_toks": 12}, {"max_gen_toks": 12, "until": [stop, "\0"]}, {"max_gen_toks": 5}]
    got = lm.generate_until(requests(*zip(prompts, options, strict=True)))
    assert got[0] == plain[0]
    assert got[1] == plain[1][: plain[1].index(stop)]
    assert plain[2].startswith(got[2].rstrip("\ufffd"))
    # A request that is there six times, as of majorities, gets six texts, however many are computed at once.
    drawn = {"max_gen_toks": 12, "do_sample": True, "temperature": 1.5}
    assert len(set(lm.generate_until(requests(*[("One", drawn)] * 6)))) == 6


def test_nothing_is_cut_and_unknown_settings_are_refused(lm: HarnessModel, monkeypatch) -> None:
    monkeypatch.setattr("swa_jax.evaluate.harness.write_replies", None)  # nothing is answered before a refusal
    with pytest.raises(ConfigError, match="takes 67 tokens, more than max_length = 64"):
        lm.loglikelihood(requests(("a" * 60, "b" * 7)))
    with pytest.raises(ConfigError, match="max_gen_toks = 10 takes 70 tokens"):
        lm.generate_until(requests(("a", {"max_gen_toks": 5}), ("a" * 60, {"max_gen_toks": 10})))
    with pytest.raises(ConfigError, match="generation option 'num_beams' is not supported"):
        lm.generate_until(requests(("a", {"num_beams": 4})))
    with pytest.raises(ConfigError, match="has no task 'no_such_task'"):
        run_harness(lm, ["no_such_task"])


# ---- a local task file, end to end ----

GENERATION = """\
task: recall_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 24}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
LIKELIHOOD = """\
task: recall_likelihood
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the harness and what it imports warn about themselves
def test_a_local_task_file_on_the_recall_model(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    from swa_jax.checkpoint.folder import load_model
    from swa_jax.evaluate import needle_examples

    checkpoint = import_model("swa_jax/recall", tmp_path / "checkpoint")
    tokenizer = load_tokenizer("swa_jax/recall")
    drawn = needle_examples(tokenizer, length=384, num_examples=6, depths=[0.1, 0.5, 0.9], seed=3)
    documents = [
        {"prompt": tokenizer.decode(e.prompt), "answer": tokenizer.decode(e.answer).removesuffix(".")} for e in drawn
    ]
    data = tmp_path / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    (tmp_path / "generate.yaml").write_text(GENERATION.format(data=data))
    (tmp_path / "likelihood.yaml").write_text(LIKELIHOOD.format(data=data))
    examples = []
    for document in documents:
        prompt = tokenizer.encode(document["prompt"])
        whole = tokenizer.encode(document["prompt"] + document["answer"])
        examples.append(Example(prompt, whole[len(prompt) :], [document["answer"]]))
    rates = {}
    for recipe in ("layers:2,5", "window"):
        pattern = AttentionPattern.from_recipe(recipe, 8, sliding_window=32)
        model = load_model(checkpoint, pattern=pattern, dtype="float32")
        lm = HarnessModel(model, tokenizer, batch_size=6)
        rows = run_harness(lm, ["recall_generate", "recall_likelihood"], folder=tmp_path)
        assert all(row["n"] == 6 for row in rows)
        found = {(row["task"], row["metric"]): (row["score"], row["interval"]) for row in rows}
        ours = score_answers(model, examples)
        totals = -ours.nll * [len(e.answer) for e in examples]
        perplexity, interval = found["recall_likelihood", "perplexity"]
        assert perplexity == pytest.approx(np.exp(-totals.mean()), rel=1e-5)
        low, high = bootstrap(totals)[1:]
        assert interval == pytest.approx([np.exp(-high), np.exp(-low)], rel=1e-5)
        assert found["recall_likelihood", "acc"][0] == pytest.approx(ours.right.mean())
        assert found["recall_likelihood", "acc"][1] == pytest.approx(accuracy_interval(ours.right).interval)
        texts = [
            tokenizer.decode(row).split(".")[0]
            for row in generate(model, [e.prompt for e in examples], max_new_tokens=24, stop_tokens=[tokenizer.eos_id])
        ]
        same = np.mean([text == e.references[0] for text, e in zip(texts, examples, strict=True)])
        assert found["recall_generate", "exact_match"][0] == pytest.approx(same)
        rates[recipe] = same
    assert rates["layers:2,5"] > rates["window"] == 0
