"""`swa-jax evaluate` by RULER's other tasks, on problems, and in a model's chat template."""

import datetime
import json
import shutil
import sys
from pathlib import Path

import pytest
from characters import Characters
from command_line import fails, run
from ruler_files import write_ruler_data
from tiny_models import byte_checkpoint, make, with_template

import swa_jax
from swa_jax.base.errors import ConfigError
from swa_jax.cli.evaluate.around import Around
from swa_jax.cli.evaluate.ruler import RulerPrompts
from swa_jax.data.chat import PROMPT, Wrap, chat_text, chat_wrap, load_chat_template, prompt_tokens
from swa_jax.data.prompt_file import Prompt
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.evaluate import needle_examples
from swa_jax.evaluate.question_scores import _prompt_tokens
from swa_jax.evaluate.questions import Question

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:{{ m.content | trim }};{% endfor %}a:"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, byte_tokenizer):
    folder = tmp_path_factory.mktemp("prompts")
    return byte_checkpoint(folder, byte_tokenizer, make("Fw", sliding_window=16), max_position_embeddings=4096)


@pytest.fixture(scope="module")
def talking(checkpoint, tmp_path_factory):
    return with_template(checkpoint, tmp_path_factory.mktemp("chat"), TEMPLATE)


# ---- what stands around a question ----


@pytest.mark.parametrize("thinking", [None, False])
@pytest.mark.parametrize("text", ["What is it?", " \n with blanks \n"])
def test_the_tokens_are_those_of_generate(talking, text, thinking) -> None:
    tokenizer = load_tokenizer(talking)
    (expected,) = prompt_tokens(talking, tokenizer, [Prompt(text, None)], True, thinking)
    wrap = chat_wrap(talking, thinking)
    asked = Question("b", "g", text, ["x"], 4, None)
    assert _prompt_tokens(tokenizer, asked, 200, False, wrap) == (expected, False)
    assert wrap.after.endswith("<think></think>") == (thinking is False)
    (talking / "chat_template.jinja").write_text(TEMPLATE.replace(" | trim", ""))
    try:
        (expected,) = prompt_tokens(talking, tokenizer, [Prompt(text, None)], True, thinking)
        assert _prompt_tokens(tokenizer, asked, 200, False, chat_wrap(talking, thinking)) == (expected, False)
    finally:
        (talking / "chat_template.jinja").write_text(TEMPLATE)
    few_shots = Question("b", "g", text, ["x"], 4, None, chat=False)
    plain = tokenizer.start_ids + tokenizer.encode(text)
    assert _prompt_tokens(tokenizer, few_shots, 200, False, wrap) == (plain, False)


def test_a_template_brings_its_start_token_itself(talking) -> None:
    class WithStart(Characters):
        start_ids = (1,)

    for wrap, start in ((chat_wrap(talking), []), (Wrap(), [1]), (Wrap.of(f"u:{PROMPT};"), [1])):
        (example,) = needle_examples(WithStart(), length=600, num_examples=1, depths=[0.5], wrap=wrap, haystack="hay ")
        assert example.prompt[: len(start)] == start
        text = WithStart().decode(example.prompt[len(start) :])
        assert text.startswith(wrap.before + "hay")
        assert text.endswith(f"What is the special magic number for {example.meta['key']}?{wrap.after}")
        answer = WithStart().decode(example.answer)
        assert answer.startswith(" The" if not wrap.after else "The")
        assert len(example.prompt) + len(example.answer) == 600
        needle = f"\nOne of the special magic numbers for {example.meta['key']}"
        assert WithStart().decode(example.prompt[example.meta["needle_start"] :]).startswith(needle)


def test_what_is_measured_is_the_same_tomorrow(tmp_path) -> None:
    """Templates such as that of Llama 3.2 write the date."""
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}: {{ messages[0].content }}")
    assert chat_wrap(tmp_path).before == "26 Jul 2024: "
    said = [{"role": "user", "content": "hi"}]
    assert chat_text(tmp_path)(said) == "26 Jul 2024: hi"
    today = f"{datetime.datetime.now():%Y}"
    assert f"{today}: hi" in load_chat_template(tmp_path).render(said)  # what is generated is of today


def test_what_does_not_go_together_is_one_sentence(checkpoint, talking, tmp_path) -> None:
    def refused(folder, message: str, answers_at_once: str | None = None, **options) -> None:
        with pytest.raises(ConfigError, match=message):
            Around(**options).wrap(folder, answers_at_once)

    refused(checkpoint, "has no chat template", chat=True)
    refused(talking, "add --chat", chat=False, thinking=True)
    refused(checkpoint, "has no chat template", thinking=True)
    refused(talking, "give one of them", chat=True, template=tmp_path / "template.txt")
    (tmp_path / "empty.txt").touch()
    sentence = f"--template {tmp_path / 'empty.txt'}: the template around a prompt must hold {{prompt}} exactly once"
    refused(talking, sentence, template=tmp_path / "empty.txt")
    refused(talking, "the answer follows RULER's prompts at once", "RULER's prompts", chat=True, thinking=True)
    Around(chat=True, thinking=False).wrap(talking, "RULER's prompts")
    assert Around().wrap(checkpoint) == Around(chat=False).wrap(talking) == Wrap()
    assert Around().wrap(talking) == Around(chat=True).wrap(talking) == chat_wrap(talking)
    own = tmp_path / "own.txt"
    own.write_text(f"u:{PROMPT};")
    assert (
        Around(template=own).wrap(talking) == Around(template=own, chat=False).wrap(talking) == Wrap.of(f"u:{PROMPT};")
    )
    # The answer follows at once: a model that would think first is told not to.
    assert Around().wrap(talking, "the prompts") == chat_wrap(talking, False) != chat_wrap(talking)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].role }}")
    refused(tmp_path, "does not write a question exactly once", chat=True)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    refused(tmp_path, "does not read 'enable_thinking'", chat=True, thinking=False)


# ---- RULER ----


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_ruler_data(tmp_path_factory.mktemp("ruler"))


def test_too_little_room_is_said_before_the_first_prompt(data) -> None:
    # Lists below 4096 tokens need less than longer ones do.
    def grid(lengths: str, *tasks: str):
        return RulerPrompts(lengths=lengths, data=data).grid(tasks, None, 1, 0, Wrap())

    with pytest.raises(ConfigError, match=r"length is 4500 tokens, but the shortest prompt of cwe takes"):
        grid("9000,3000,4500", "vt", "cwe").check(Characters())
    with pytest.raises(ConfigError, match=r"length is 300000 tokens, but the data of niah_single_2 ends before that"):
        grid("3000,300000", "niah_single_2").check(Characters())
    short = grid("3000", "cwe")
    short.check(Characters())
    ((cell, *_),) = [*short.cells(Characters())]
    assert cell == ("cwe", 3000, None)


def test_tasks_of_ruler_go_on_after_an_interruption(talking, data, tmp_path, monkeypatch) -> None:
    options = ("vt", "fwe", "qa_2", "--data", data, "--lengths", 2200, "--examples", 2)
    options += ("--max-new-tokens", 2, "--batch-size", 1, "--chat", "--no-thinking")
    whole = tmp_path / "whole"
    output = run("evaluate", "ruler", talking, *options, "--out", whole)
    assert "qa: 100 % where one of the right answers is there" in output
    rows = json.loads((whole / "results.json").read_text())["ruler"]
    assert [(row["task"], row["depth"], row["num_examples"]) for row in rows] == [
        ("vt", None, 2),
        ("fwe", None, 2),
        ("qa_2", None, 2),
        ("average", None, 6),
    ]
    samples = (whole / "samples.jsonl").read_text().splitlines()
    assert len(samples) == 6
    # An interruption after four prompts: these are not answered again.
    broken = tmp_path / "broken"
    shutil.copytree(whole, broken)
    (broken / "samples.jsonl").write_text("\n".join(samples[:4]) + "\n")
    results = json.loads((broken / "results.json").read_text())
    (broken / "results.json").write_text(json.dumps(results | {"unfinished": ["ruler"], "ruler": rows[:1]}))
    from swa_jax.evaluate import generated_answers

    ran, run_batch = [], generated_answers._run_batch
    monkeypatch.setattr(generated_answers, "_run_batch", lambda *given: (ran.append(1), run_batch(*given))[1])
    run("evaluate", "ruler", talking, *options, "--out", broken)
    assert len(ran) == 2
    assert json.loads((broken / "results.json").read_text())["ruler"] == rows


# ---- problems ----


def test_problems_by_number_and_by_a_judge(talking, tmp_path) -> None:
    tokenizer = load_tokenizer(talking)
    file = tmp_path / "problems.jsonl"
    record = {"question": "How many?", "answer": "so\n#### 7", "group": "sums"}
    file.write_text(json.dumps(record) + "\n")
    command = ("evaluate", "questions", talking, "--problems", file, "--chat", "--no-thinking", "--max-new-tokens", 3)
    assert "sums" in run(*command, "--out", tmp_path / "plain")
    (answer,) = json.loads((tmp_path / "plain" / "answers.json").read_text())["own"]
    assert (answer["group"], answer["references"]) == ("sums", ["7"])
    prompt = chat_wrap(talking, False).around(
        "Solve the problem step by step. Write the result, a number, at the very end.\n\nProblem: How many?\nSolution:"
    )
    (said,) = swa_jax.generate(
        swa_jax.load_model(talking), [tokenizer.encode(prompt)], max_new_tokens=3, stop_tokens=tokenizer.end_ids
    )
    assert answer["answer"] == tokenizer.decode(said)
    judge = tmp_path / "judge.py"
    judge.write_text(
        "import json, sys\n"
        "for line in sys.stdin: print(0.5 if json.loads(line)['rule'].startswith('The answer is right if the result') "
        "else 0)\n"
    )
    run(*command, "--judge", f"{sys.executable} {judge}", "--out", tmp_path / "judged")
    (row, _) = json.loads((tmp_path / "judged" / "results.json").read_text())["questions"]
    assert (row["benchmark"], row["group"], row["score"]) == ("problems", "sums", 0.5)
    none = ("evaluate", "questions", talking)
    assert fails(*none).endswith("--longbench, --longbench-v2, --longmemeval or --problems")
