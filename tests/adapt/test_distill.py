"""Self-distillation: what is drawn, what is kept, and that neither batches, shares nor interruptions change it."""

import json
import shutil
import sys
import weakref

import jax
import numpy as np
import pytest
from command_line import fails, interrupt, json_lines, run
from tiny_models import byte_checkpoint, make

import swa_jax
from swa_jax.adapt import distill as distillation
from swa_jax.adapt.distill import PromptShare, samples_of
from swa_jax.adapt.reply_filters import find_filter
from swa_jax.base.errors import ConfigError
from swa_jax.data.distilled import read_distilled
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.model.engine import Engine
from swa_jax.model.top_logprobs import top_logprobs

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %}?{% else %}!{% endif %}"
TEXTS = ["Hello, world. " * 4, "one", "All that is gold. " * 2, "one"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, byte_tokenizer):
    return byte_checkpoint(tmp_path_factory.mktemp("distill"), byte_tokenizer, make("FF", sliding_window=None))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": text, "answer": text[:3]}) + "\n" for text in TEXTS))
    return file


def command(checkpoint, prompts, out, *more):
    drawing = "-n 2 --max-new-tokens 6 --chunk 16 --slots 2 --temperature 1.5 --seed 5 --keep-cut"
    return ("distill", checkpoint, "--prompts", prompts, "--out", out, *drawing.split(), *more)


def test_samples_depend_on_seed_prompt_and_number_alone(checkpoint, prompts, tmp_path, monkeypatch):
    whole = tmp_path / "whole.jsonl"
    printed = run(*command(checkpoint, prompts, whole))
    assert printed.endswith(f"{whole}: 8 of 8 replies kept, the others are in {whole}.rejected\n")
    expected = json_lines(whole)
    assert [(line["prompt"], line["sample"]) for line in expected] == [(p, s) for p in range(4) for s in range(2)]
    # Different samples of one prompt, of equal prompts too; one at a time, and fewer of them, they stay the same.
    texts = [line["reply_tokens"] for line in expected]
    assert len(set(texts)) == 8
    alone = tmp_path / "alone.jsonl"
    run(*command(checkpoint, prompts, alone, "--slots", 1, "-n", 1))
    assert json_lines(alone) == expected[::2]
    # Shares: each process has its own, together they are the whole.
    shares = [tmp_path / f"{part}.jsonl" for part in (1, 2, 3)]
    for part, file in enumerate(shares, 1):
        run(*command(checkpoint, prompts, file, "--share", f"{part}/3"))
    assert [{line["prompt"] for line in json_lines(file)} for file in shares] == [{0, 3}, {1}, {2}]
    together = sorted((line for file in shares for line in json_lines(file)), key=lambda x: (x["prompt"], x["sample"]))
    assert together == expected
    # Interrupted twice, the same command ends with the same file.
    resumed = tmp_path / "resumed.jsonl"
    with monkeypatch.context() as patch:
        interrupt(patch, 3)
        run(*command(checkpoint, prompts, resumed), status=130)
    assert not resumed.exists()
    unfinished = tmp_path / "resumed.jsonl.unfinished"
    before = len(json_lines(unfinished)) - 1
    assert before in (2, 3)
    unfinished.write_text(unfinished.read_text() + '{"prompt": 3, "sam')  # a line that a kill cut off
    assert "holds replies of other content" in fails(*command(checkpoint, prompts, resumed, "--seed", 6))
    drawn = []
    add = distillation.ReplyFile.add
    monkeypatch.setattr(distillation.ReplyFile, "add", lambda self, reply: (drawn.append(1), add(self, reply)))
    run(*command(checkpoint, prompts, resumed))
    assert len(drawn) == 8 - before
    assert resumed.read_bytes() == whole.read_bytes()
    other = tmp_path / "other.jsonl"
    run(*command(checkpoint, prompts, other, "--seed", 6))
    assert [line["reply_tokens"] for line in json_lines(other)] != texts


def test_samples_of_equal_prompts_and_shares():
    prompts = [[1, 2], [3], [1, 2], [4]]
    samples = samples_of(prompts, 3)
    assert len({sample.key for sample in samples}) == 12
    halves = [samples_of(prompts, 3, PromptShare(part, 2)) for part in (1, 2)]
    assert sorted((s.prompt, s.number, s.key) for half in halves for s in half) == [
        (s.prompt, s.number, s.key) for s in samples
    ]


def test_what_is_stored_of_a_reply(checkpoint, prompts, tmp_path):
    """Prompt, reply and end token, and the log-probabilities of the model where each token of the reply stands."""
    ending = tmp_path / "model"  # half of all bytes end a reply
    shutil.copytree(checkpoint, ending)
    (ending / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(128))}))
    out, tokenizer = tmp_path / "out.jsonl", load_tokenizer(checkpoint)
    run(*command(ending, prompts, out, "--top-logprobs", 5))
    model = swa_jax.load_model(checkpoint)
    samples = read_distilled((out,), tokenizer, 5)
    longest, ended = max(len(sample.tokens) for sample in samples), 0
    padded = np.array([np.pad(sample.tokens, (0, longest - len(sample.tokens))) for sample in samples])
    log_p = np.asarray(jax.nn.log_softmax(model(padded)))  # nothing sees the padding behind it
    for line, sample, row in zip(json_lines(out), samples, log_p, strict=True):
        assert line["kept"] is True
        prompt, reply = sample.tokens[: sample.boundary], sample.tokens[sample.boundary :]
        assert prompt.tolist() == tokenizer.encode(TEXTS[line["prompt"]])
        assert line["ended_by"] == ("length" if line["tokens"] == 6 else "end")
        ended += line["ended_by"] == "end"
        assert len(reply) == line["tokens"] + (line["ended_by"] == "end")
        assert (reply[-1] < 128) == (line["ended_by"] == "end")  # the one that was drawn
        assert tokenizer.decode(reply[: line["tokens"]]) == line["text"]
        expected = row[sample.boundary - 1 : len(sample.tokens) - 1]
        order = np.argsort(-expected, axis=-1)[:, :5]
        np.testing.assert_array_equal(sample.top.tokens, order)
        np.testing.assert_allclose(sample.top.logprobs, np.take_along_axis(expected, order, -1), rtol=1e-3, atol=1e-4)
    assert ended > 0
    assert read_distilled((out,), tokenizer, 2)[0].top.tokens.shape[1] == 2
    assert read_distilled((out,), tokenizer)[0].top is None
    with pytest.raises(ConfigError, match=r"has 5 log-probabilities a token, but 'distill.top_k' is 6"):
        read_distilled((out,), tokenizer, 6)


def test_log_probabilities_under_full_attention_decode(checkpoint):
    pattern = make("ww", sliding_window=4, full_attention_decode=True)
    model = swa_jax.load_model(checkpoint, pattern)
    prompt, reply = list(range(10, 40)), [50, 60, 70]
    tokens = np.array([prompt + reply])
    expected = jax.nn.log_softmax(model(tokens, full_from=np.array([30]))[0])[29:-1]
    ids, values = top_logprobs(model, prompt, reply, 256)
    np.testing.assert_allclose(values, np.take_along_axis(np.asarray(expected), ids, -1), atol=1e-4)
    with pytest.raises(ConfigError, match="top log-probabilities must be 1 to 256"):
        top_logprobs(model, prompt, reply, 257)


# ---- filters ----


def kept(text: str, reply: str, answer="x", **record) -> bool:
    line = {"prompt": 0, "sample": 0, "text": reply, "prompt_text": "what?"}
    return find_filter(text, "answer")({"answer": answer} | record, line, "prompt 0")


def test_filters(tmp_path):
    assert kept("none", "anything")
    assert kept("exact", " 42\n", "42")
    assert not kept("exact", "It is 42", "42")
    assert kept("exact", "<think>43? no</think>\n\n42", ["forty-two", "42 "])
    assert kept("contains", "It is 42.", "42")
    assert not kept("contains", "<think>42</think> 43", "42")
    script = tmp_path / "filter.py"
    script.write_text(
        "import json, sys\nreply = json.load(sys.stdin)\n"
        "sys.exit({'good': 0, 'bad': 1}.get(reply['text'] + reply['record'].get('more', ''), 7))\n"
    )
    program = f"program:{sys.executable} {script}"
    assert kept(program, "good")
    assert not kept(program, "bad")
    assert kept(program, "go", more="od")
    with pytest.raises(ConfigError, match="ended with status 7 on the reply to prompt 0: 0 keeps a reply, 1"):
        kept(program, "neither")
    judge = tmp_path / "judge.py"
    judge.write_text(
        "import json, sys\nfor line in sys.stdin:\n    asked = json.loads(line)\n"
        "    said = asked['answer'], asked['reference'], asked['question']\n"
        "    print('yes' if said == ('r', 'a / b', 'q') else 'no')\n"
    )
    assert kept(f"judge:{sys.executable} {judge}", "<think>n</think>r", ["a", "b"], question="q")
    assert not kept(f"judge:{sys.executable} {judge}", "r", ["a", "b"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("exakt", "--filter is 'exakt'; did you mean 'exact'?"),
        ("exact:x", "--filter exact takes nothing after it"),
        ("program", "--filter program needs what decides: program:COMMAND"),
        ("program: ", "the filter's command is empty"),
        ("judge:http://localhost:1/v1", "names no model"),
    ],
)
def test_filters_that_there_are_not(text, sentence):
    with pytest.raises(ConfigError, match=sentence.replace("?", r"\?")):
        find_filter(text, "answer")


def test_only_what_the_filter_keeps_is_data(checkpoint, prompts, tmp_path):
    script, out = tmp_path / "filter.py", tmp_path / "out.jsonl"
    script.write_text("import json, sys\nsys.exit(json.load(sys.stdin)['sample'])\n")
    printed = run(*command(checkpoint, prompts, out, "--filter", f"program:{sys.executable} {script}"))
    assert "4 of 8 replies kept" in printed
    assert {line["sample"] for line in json_lines(out)} == {0}
    refused = json_lines(tmp_path / "out.jsonl.rejected")
    assert {line["sample"] for line in refused} == {1}
    assert len(refused) == 4
    cut = tmp_path / "cut.jsonl"
    arguments = [word for word in command(checkpoint, prompts, cut) if word != "--keep-cut"]
    printed = run(*arguments)
    assert {line["ended_by"] for line in json_lines(cut)} <= {"end"}
    lost = len(json_lines(tmp_path / "cut.jsonl.rejected"))
    assert printed.endswith(
        f".rejected; --max-new-tokens 6 cut off {lost} of them: give more, or keep them with --keep-cut\n"
    )


def test_thinking_is_switched_by_the_template(checkpoint, prompts, tmp_path):
    talking = tmp_path / "model"
    shutil.copytree(checkpoint, talking)
    (talking / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = load_tokenizer(talking)
    for option, mark in (("--thinking", "?"), ("--no-thinking", "!")):
        out = tmp_path / f"{option}.jsonl"
        run(*command(talking, prompts, out, "--chat", option, "-n", 1))
        sample = read_distilled((out,), tokenizer)[0]
        assert tokenizer.decode(sample.tokens[: sample.boundary]) == TEXTS[0] + mark
    out = tmp_path / "out.jsonl"
    assert fails(*command(talking, prompts, out, "--thinking")).endswith("none is used; add --chat")
    (talking / "chat_template.jinja").write_text("{{ messages[0].content }}")
    refused = fails(*command(talking, prompts, out, "--chat", "--thinking"))
    assert refused.endswith("the model's chat template does not read 'enable_thinking'")


def test_what_is_wrong_is_one_sentence(checkpoint, prompts, tmp_path):
    out = tmp_path / "out.jsonl"
    assert fails(*command(checkpoint, prompts, out, "--share", "3/2")).startswith("--share must be K/N")
    assert "has no prompt" in fails(*command(checkpoint, prompts, out, "--share", "5/5"))
    assert "some must be left over" in fails(*command(checkpoint, prompts, out, "--top-logprobs", 257))
    missing = fails(*command(checkpoint, prompts, out, "--filter", "exact", "--answer-field", "right"))
    assert missing.startswith(f"{prompts}, prompt 0 has no 'right' to compare with")
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text(json.dumps({"prompt_tokens": "AAAA", "reply_tokens": "AAAAAA=="}) + "\n")
    with pytest.raises(ConfigError, match=r"sample 1, prompt_tokens is not what `swa-jax distill` writes"):
        read_distilled((damaged,), load_tokenizer(checkpoint))


def test_prompts_that_share_no_cache_are_not_in_memory_together(checkpoint, prompts, tmp_path, monkeypatch):
    """As of LongRoPE, whose caches are of two lengths."""
    begun, begin = [], Engine.__init__

    def alone(engine, *arguments, **options):
        assert all(other() is None for other in begun)
        begun.append(weakref.ref(engine))
        begin(engine, *arguments, **options)

    monkeypatch.setattr(Engine, "__init__", alone)
    monkeypatch.setattr(distillation, "by_rope_length", lambda *_: [[0, 1], [2, 3, 4, 5, 6, 7]])
    run(*command(checkpoint, prompts, tmp_path / "out.jsonl"))
    assert len(begun) == 2
