"""The verbs `generate` and `chat`, with files of prompts, stop strings and chat templates."""

import json
import shutil
import signal
import weakref

import pytest
from command_line import fails, interrupt, json_lines, run
from tiny_models import byte_checkpoint, make, with_template

import swa_jax
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.model.engine import Engine

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, byte_tokenizer):
    return byte_checkpoint(tmp_path_factory.mktemp("cli"), byte_tokenizer, make("Fw", sliding_window=16))


@pytest.fixture(scope="module")
def talking(checkpoint, tmp_path_factory):
    """The same model with a chat template."""
    return with_template(checkpoint, tmp_path_factory.mktemp("chat"), TEMPLATE)


def continuation(checkpoint, text: str, **options) -> str:
    """What the library makes of a prompt."""
    tokenizer = load_tokenizer(checkpoint)
    options = {"max_new_tokens": 6, "stop_tokens": tokenizer.end_ids} | options
    new = swa_jax.generate(swa_jax.load_model(checkpoint), [tokenizer.encode(text)], **options)
    return tokenizer.decode(new[0])


def test_prompts_and_replies_in_files(checkpoint, tmp_path, monkeypatch):
    texts = ["Hello, world. " * 4, "one", "All that is gold does not glitter. " * 2]
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "replies.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    command = (
        "generate", checkpoint, "--prompts", prompts, "-n", 2, "--max-new-tokens", 6, "--chunk", 16, "--slots", 2,
        "--temperature", 1.5, "--seed", 5,
    )  # fmt: skip
    printed = [json.loads(line) for line in run(*command).splitlines()]
    assert len(printed) == 6
    assert printed[0] != printed[1]  # two samples
    # Interrupted after three replies, and again after four: the same command ends with the same file.
    with monkeypatch.context() as patch:
        interrupt(patch, 3)
        run(*command, "--out", out, status=130)
    assert not out.exists()
    other = fails(*command, "--seed", 6, "--out", out)
    assert "holds replies of other content (other model, prompts or settings)" in other
    assert run(*command, "--out", out).endswith(f"{out}: 6 replies\n")
    assert [(line["prompt"], line["sample"]) for line in json_lines(out)] == [
        (p, s) for p in range(3) for s in range(2)
    ]
    assert [line["text"] for line in json_lines(out)] == printed
    assert {line["ended_by"] for line in json_lines(out)} <= {"length", "end"}
    assert run(*command, "--out", out) == f"{out} is finished already\n"
    assert fails(*command, "--seed", 6, "--out", out).startswith(f"{out} is there already: remove it")


def test_what_is_refused_is_refused_before_weights_are_read(checkpoint, talking, tmp_path, monkeypatch):
    monkeypatch.setattr("swa_jax.checkpoint.folder._stack", None)
    file, empty = tmp_path / "prompts.jsonl", tmp_path / "empty.jsonl"
    file.write_text('"hi"\n{"messages": [{"role": "user"}]}\n')
    empty.write_text('"hi"\n""\n')
    (tmp_path / "out.jsonl").write_text("mine\n")
    (tmp_path / "begun.jsonl.unfinished").write_text("mine\n")
    hi = ("generate", talking, "hi")
    for command, sentence in (
        ((*hi, "--stop", ""), "a stop string is empty"),
        ((*hi, "--top-p", 0), "--top-p must be above 0 and at most 1, got 0"),
        ((*hi, "--pattern", "windows"), "windows"),
        ((*hi, "-n", 2), "-n 2 needs a --temperature above 0"),
        ((*hi, "--top-k", 5), "--top-k 5 needs a --temperature above 0"),
        (("chat", talking, "--top-p", 0.9), "--top-p 0.9 needs a --temperature above 0"),
        (("distill", talking, "--prompts", file, "--out", tmp_path / "d", "--temperature", 0), "-n 4 needs a"),
        ((*hi, "--max-new-tokens", 10**6), "times as long as the model's context"),
        ((*hi, "--out", tmp_path / "out.jsonl"), "is there already: remove it"),
        ((*hi, "--out", tmp_path / "begun.jsonl"), "holds no replies"),
        (("generate", talking, "--prompts", empty), f"prompt 2 of {empty} is empty"),
        (("generate", talking, "--prompts", file), f"{file}, line 2: messages[0] must be"),
        (("generate", checkpoint, "hi", "--chat"), "in tokenizer_config.json): leave out --chat"),
        (("chat", talking, "--pattern", "windows"), "windows"),
        (("chat", checkpoint), f"{checkpoint} has no chat template"),
        ((*hi, "--thinking"), "thinking cannot be switched on or off: it is the chat template that does so"),
        (("evaluate", "needles", talking, "--pattern", "windows"), "windows"),
        (("evaluate", "needles", talking, "--length", 10**6), "times as long as the model's context"),
        (("evaluate", "routing", checkpoint), "no layer of this pattern is routed"),
        (
            ("select", "nll", talking, "--budget", 1, "--window", 8, "--length", 10**6, "--out", tmp_path / "p.json"),
            "times as long as the model's context",
        ),
        (("compare", talking, "--pattern", "windows", "--out", tmp_path / "c"), "windows"),
        (("distill", talking, "--prompts", file, "--out", tmp_path / "d"), f"{file}, line 2: messages[0] must be"),
        (("distill", talking, "--prompts", empty, "--out", tmp_path / "d", "--top-logprobs", 10**6), "vocabulary has"),
        (("bench", "generation", checkpoint, "--length", 10**6), "times as long as the model's context"),
    ):
        assert sentence in fails(*command)
    shutil.copytree(talking, tmp_path / "mute")
    (tmp_path / "mute/tokenizer.json").unlink()
    assert fails("generate", tmp_path / "mute", "hi").startswith("the model has no tokenizer.json, ")


def test_a_stop_string_ends_a_reply(checkpoint, tmp_path):
    whole = continuation(checkpoint, "Hello", max_new_tokens=12)
    stop = whole[4:6]
    options = ("--max-new-tokens", 12)
    assert run("generate", checkpoint, "Hello", *options) == whole + "\n"
    expected = whole[: whole.index(stop)]
    assert run("generate", checkpoint, "Hello", *options, "--stop", stop) == expected + "\n"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Hello\n")
    run("generate", checkpoint, "--prompts", prompts, *options, "--stop", "none", "--stop", stop, "--out",
        tmp_path / "out.jsonl")  # fmt: skip
    (reply,) = json_lines(tmp_path / "out.jsonl")
    assert (reply["text"], reply["ended_by"]) == (expected, "stop")
    cut = next(n for n in range(1, 13) if stop in continuation(checkpoint, "Hello", max_new_tokens=n))
    assert reply["tokens"] == cut  # not those that were drawn with it


def test_chat_templates(checkpoint, talking, tmp_path):
    expected = continuation(talking, "u:hi;a:")
    assert run("generate", talking, "hi", "--chat", "--max-new-tokens", 6) == expected + "\n"
    prompts = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "hi"}]
    prompts.write_text(json.dumps({"messages": messages}) + '\n"plain"\n')
    printed = run("generate", talking, "--prompts", prompts, "--max-new-tokens", 6).splitlines()
    assert [json.loads(line) for line in printed] == [
        continuation(talking, "s:S;u:hi;a:"),
        continuation(talking, "plain"),
    ]
    assert fails("generate", checkpoint, "--prompts", prompts).startswith("the model has no chat template (")
    assert fails("generate", checkpoint) == "give either a prompt or --prompts FILE"
    assert fails("generate", checkpoint, "hi", "--prompts", prompts) == "give either a prompt or --prompts FILE"


def test_a_conversation(checkpoint, talking, tmp_path):
    """Every reply is that to all that has been said; /new forgets."""
    first = continuation(talking, "u:hi;a:")
    second = continuation(talking, f"u:hi;a:{first};u:more;a:")
    options = ("--max-new-tokens", 6, "--length", 64)
    output = run("chat", talking, *options, input="hi\nmore\n\n/new\nhi\n/exit\nnot read\n")
    assert output == "".join(f"{reply}\n" for reply in (first, second, first))
    told = continuation(talking, "s:S;u:hi;a:")
    assert run("chat", talking, *options, "--system", "S", input="hi") == f"{told}\n"
    output = run("chat", talking, *options, input=b"\xff\nhi\n")
    assert output == f"the message is not UTF-8\n{first}\n"
    output = run("chat", talking, "--max-new-tokens", 6, "--length", 63, input="x" * 59 + "\nhi\n")
    assert output.startswith("the conversation has 64 tokens and --length is 63: /new starts anew\n")
    assert output.endswith(f"{first}\n")
    careful = with_template(checkpoint, tmp_path / "c", TEMPLATE + "{% if enable_thinking %}t:{% endif %}")
    thought = continuation(talking, "u:hi;a:t:")
    assert run("chat", careful, *options, "--thinking", input="hi") == f"{thought}\n"
    assert run("generate", careful, "hi", "--chat", "--thinking", "--max-new-tokens", 6) == f"{thought}\n"
    picky = with_template(
        checkpoint, tmp_path, "{% if messages[-1].content == 'no' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
    )
    output = run("chat", picky, *options, input="hi\nno\nmore\n").splitlines()
    assert output[1].endswith("refuses these messages: no")
    assert [output[0], *output[2:]] == f"{first}\n{second}".splitlines()


def test_a_second_interruption_ends_a_reply_that_has_not_begun(talking, monkeypatch):
    def reading(*_, **__):
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)
        yield

    monkeypatch.setattr(Engine, "stream", reading)
    assert run("chat", talking, input="hi\n", status=130) == "interrupted\n"


def test_prompts_that_share_no_cache_are_not_in_memory_together(checkpoint, tmp_path, monkeypatch):
    """As of LongRoPE, whose caches are of two lengths."""
    begun, begin = [], Engine.__init__

    def alone(engine, *arguments, **options):
        assert all(other() is None for other in begun)
        assert options["prefixes"] == 0  # there is no other prompt that could begin like this one
        begun.append(weakref.ref(engine))
        begin(engine, *arguments, **options)

    monkeypatch.setattr(Engine, "__init__", alone)
    monkeypatch.setattr("swa_jax.evaluate.replies.by_rope_length", lambda *_: [[0], [1]])
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    run("generate", checkpoint, "--prompts", tmp_path / "prompts.txt", "--max-new-tokens", 6)
    assert len(begun) == 2
