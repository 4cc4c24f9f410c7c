"""`swa-jax adapt`: what it refuses, what it plans, what it chooses, and (slow) that a killed run ends as another."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import fails, run
from small_job import SMALL, small_job
from tiny_models import byte_checkpoint, make, start_tokenizer, with_template

from swa_jax.adapt.estimate import estimate_report, estimate_text
from swa_jax.adapt.job import STAGES, AdaptOptions, command_line, find_source, prepare, tuning
from swa_jax.adapt.search import find_space
from swa_jax.adapt.stages import StageResults, _Stages
from swa_jax.adapt.tasks import Data, EvalTask, compared, doubts, draw_tasks, lost
from swa_jax.base.errors import ConfigError
from swa_jax.base.files import read_json
from swa_jax.checkpoint.named import bundled
from swa_jax.checkpoint.served_cache import Memory
from swa_jax.data.tokenizer import load_tokenizer
from swa_jax.evaluate.examples import Example
from swa_jax.train.objectives import Distill

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(bundled("recall"))


@pytest.fixture(scope="module", autouse=True)
def source():
    """In the cache before a command names it, which then says so in no line."""
    return find_source("recall")


def test_the_model_of_chains_is_asked_for_chains(tmp_path):
    settings = AdaptOptions("chains", tmp_path / "out", 0.3, length=256, window=(16,), examples=4, choose_by=2, tune=1)
    job = prepare(settings)
    assert job.source.bundled == "chains"
    assert [task.name for task in job.tasks.measuring] == ["chains-1", "chains-2", "chains-3", "text"]
    for task in job.tasks.measuring[:3]:
        assert [len(example.meta["statements"]) for example in task.examples] == [int(task.name[-1])] * 4
    choosing = {tuple(one.prompt) for task in job.tasks.choosing for one in task.examples}
    assert choosing.isdisjoint(tuple(one.prompt) for task in job.tasks.measuring for one in task.examples)
    assert [source.kind for source in tuning(job, Path("pattern.json")).stages[0].data] == ["chains", "text"]
    text = tmp_path / "text"
    text.write_text("the quick brown fox\n" * 2000)
    with_text = prepare(dataclasses.replace(settings, text=(text,), tune=0))
    assert [task.name for task in with_text.tasks.measuring] == ["needles-1", "needles-4", "text"]


# ---- what is refused, before anything is done ----


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("recall", "--kv-budget", 0), "--kv-budget is 0: give the share of full attention's cache, above 0"),
        (("recall", "--kv-budget", 1.5), "--kv-budget is 1.5"),
        (("recall", "--kv-budget", 0.3, "--for", "vlm"), "--for is 'vlm'; did you mean 'vllm'"),
        (("recall", "--kv-budget", 0.05, "--for", "vllm"), "takes at least 0.172 of full attention's"),
        (("recall", "--kv-budget", 0.3, "--for", "sglang"), "takes at least 0.374 of full attention's"),
        (("recall", "--kv-budget", 0.3, "--unit", "heads", "--for", "vllm"), "which vllm cannot run"),
        (
            ("recall", "--kv-budget", 0.3, "--batched-tokens", 64),
            "--batched-tokens is of vllm, vllm-plugin, tpu-inference, sglang, sglang-jax, mlx-lm",
        ),
        (("recall", "--kv-budget", 0.3, "--window", "2048"), "which is full attention: take a smaller --window"),
        (("recall", "--kv-budget", 0.3, "--window", "0"), "--window is '0': give whole numbers from 1 on"),
        (("recall", "--kv-budget", 0.3, "--text", "absent.txt"), "--text absent.txt does not exist"),
        (("nowhere", "--kv-budget", 0.3), "nowhere is no model: give a checkpoint folder"),
        (("Qwen/Qwen3-0.6B", "--kv-budget", 0.3), "or here with 'swa-jax import Qwen/Qwen3-0.6B DST'"),
        (("swa_jax", "--kv-budget", 0.3), "holds no config.json"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_before_anything_is_written(arguments, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert sentence in fails("adapt", arguments[0], tmp_path / "out", *arguments[1:])
    assert not list(tmp_path.iterdir())


def test_tuning_without_data_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    (tmp_path / "text.txt").write_text("A text of some length. " * 2000)
    words = ["swa_jax/recall", tmp_path / "out", "--kv-budget", 0.3, "--text", tmp_path / "text.txt", "--tune", 5]
    assert "--tune needs --tune-data FILE" in fails("adapt", *words)
    assert "no such file" in fails("adapt", *words, "--tune-data", "absent.txt")


def test_another_folder_is_left_alone(tmp_path):
    (tmp_path / "adapt").mkdir()
    (tmp_path / "model").mkdir()
    assert "holds something else: name a new folder" in fails("adapt", "recall", tmp_path, "--kv-budget", 0.3)
    assert (tmp_path / "model").exists()


def test_the_smallest_budget_that_is_named_can_be_met(source):
    """The sentence is a promise: with the number that it names, the same command goes."""
    for server, length in (("vllm", 1024), ("vllm", 32768), (None, 4096), ("transformers", 777)):
        memory = Memory(source.config, source.hf_config, length, server, 64 if server == "vllm" else None)
        with pytest.raises(ConfigError) as caught:
            find_space(memory, 0.001, [48, 100])
        named = float(str(caught.value).split("at least ")[1].split(" of")[0])
        assert find_space(memory, named, [48, 100]).start.window.size == 48
        with pytest.raises(ConfigError):
            find_space(memory, named - 0.002, [48, 100])


def test_the_command_line_of_the_report_is_the_one_given():
    texts = (Path("x"), Path("y"))
    settings = AdaptOptions(
        "recall", Path("runs/a b"), 0.4, server="vllm", text=texts, window=(16, 32), tune=3, canary=False
    )
    assert command_line(settings) == (
        "swa-jax adapt recall 'runs/a b' --kv-budget 0.4 --for vllm --text x --text y --window 16,32 --tune 3 "
        "--no-canary"
    )


# ---- tasks ----


def test_nothing_is_measured_on_what_was_chosen_by(tokenizer):
    drawn = draw_tasks(Data(256), tokenizer, 8, 12)
    assert [task.name for task in drawn.choosing] == [task.name for task in drawn.measuring]
    for first, second in zip(drawn.choosing, drawn.measuring, strict=True):
        rows = [{tuple(one.prompt + one.answer) for one in task.examples} for task in (first, second)]
        assert len(rows[0]) >= 2
        assert not rows[0] & rows[1]
        assert {len(row) for row in rows[0] | rows[1]} == {256}


def test_rows_of_text_do_not_overlap(tokenizer, tmp_path):
    file = tmp_path / "numbers.txt"
    file.write_text(" ".join(map(str, range(6000))))
    drawn = draw_tasks(Data(256, text=(file,)), tokenizer, 8, 40)
    texts = [
        tokenizer.decode(one.prompt + one.answer)
        for tasks in drawn
        for task in tasks
        if task.name == "text"
        for one in task.examples
    ]
    assert len(texts) == 12
    whole = [set(text.split()[1:-1]) for text in texts]
    assert sum(map(len, whole)) == len(set().union(*whole)) > 100
    quick = draw_tasks(Data(256, text=(file,)), tokenizer, 4, 12)
    assert [len(tasks[-1].examples) for tasks in quick] == [2, 8]
    with pytest.raises(ConfigError, match="at least 4 rows of 8192 are needed"):
        draw_tasks(Data(8192, text=(file,)), tokenizer, 8, 40)


def test_rows_of_text_begin_with_the_start_token_if_the_tokenizer_adds_one(byte_tokenizer, tmp_path):
    starting = load_tokenizer(start_tokenizer(byte_tokenizer, tmp_path))
    file = tmp_path / "numbers.txt"
    file.write_text(" ".join(map(str, range(6000))))
    for tasks in draw_tasks(Data(512, text=(file,)), starting, 8, 40):
        (rows,) = (task.examples for task in tasks if task.name == "text")
        assert {(tuple(row.prompt), len(row.answer)) for row in rows} == {((257,), 511)}


def test_prompts_go_through_the_models_chat_template(byte_tokenizer, tmp_path):
    plain = byte_checkpoint(tmp_path, byte_tokenizer, make("Fw"), max_position_embeddings=512)
    talking = with_template(plain, tmp_path, "<{{ messages[0].content | trim }}>")
    file = tmp_path / "numbers.txt"
    file.write_text(" ".join(map(str, range(6000))))
    settings = AdaptOptions(str(talking), tmp_path / "out", 0.6, text=(file,), examples=4, choose_by=2)
    opened = {}
    for chat in (None, False):
        job = prepare(dataclasses.replace(settings, chat=chat))
        needles, _, text = job.tasks.measuring
        opened[chat] = {job.tokenizer.decode(one.prompt[:1]) == "<" for one in needles.examples}
        assert ("in the model's chat template" in needles.about) == (chat is None)
        assert not any(one.prompt[0] == job.tokenizer.encode("<")[0] for one in text.examples)
    assert opened == {None: {True}, False: {False}}
    assert command_line(dataclasses.replace(settings, chat=False)).count("--no-chat") == 1
    assert "chat" not in command_line(settings).replace(str(tmp_path), "")
    assert " --chat" in command_line(dataclasses.replace(settings, chat=True))


def test_answers_of_a_file_are_split(tokenizer, tmp_path):
    file = tmp_path / "qa.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"What is {i}?", "answer": f" {i}."}) + "\n" for i in range(9)))
    drawn = draw_tasks(Data(256, prompts=file), tokenizer, 4, 5)
    assert [task.name for task in drawn.measuring] == ["answers"]
    answers = [one.references[0] for tasks in drawn for one in tasks[0].examples]
    assert sorted(answers) == [f" {i}." for i in range(9)]
    with pytest.raises(ConfigError, match="10 examples are asked for"):
        draw_tasks(Data(256, prompts=file), tokenizer, 5, 5)


def test_tasks_that_say_little_are_named_before_the_search():
    examples = [Example([1], [2, 3], ["?"], value=(1,))] * 8
    tasks = [
        EvalTask("needles", "Needles", "", examples),
        EvalTask("own", "Answers of a file", "", [dataclasses.replace(one, value=None) for one in examples]),
        EvalTask("text", "Plain text", "", examples, answers=False),
    ]
    low, high = [1.0] * 8, [2.0] * 8
    original = {
        "needles": {"losses": low, "right": [1.0] * 3 + [0.0] * 5},
        "own": {"losses": low, "right": [0.0] * 8},
        "text": {"losses": low},
    }
    windowed = {name: {"losses": high if name == "text" else low} for name in original}
    found = doubts(tasks, original, windowed)
    weak, *same = found.sentences
    assert weak.startswith("Needles: with full attention the model itself gets 38% of the 8 answers right; take")
    assert [one.split(":")[0] for one in same] == ["Needles", "Answers of a file"]
    assert all("no difference beyond chance on 8 examples; take longer prompts" in one for one in same)
    assert not found.nothing_told
    assert doubts(tasks[:2], original, windowed).nothing_told


def test_losses_and_differences_have_the_right_sign():
    before = {"a": {"losses": [1.0, 2.0], "right": [1.0, 1.0]}, "b": {"losses": [3.0, 3.0]}}
    after = {"a": {"losses": [2.0, 3.0], "right": [0.0, 1.0]}, "b": {"losses": [3.5, 3.5]}}
    assert lost(after, before) == pytest.approx(0.75)
    tasks = [EvalTask("a", "A", "", []), EvalTask("b", "B", "", [], answers=False)]
    rows = compared(after, before, tasks)
    assert [(row["task"], row["figure"]) for row in rows] == [("a", "right"), ("a", "losses"), ("b", "losses")]
    assert [row["difference"][0] for row in rows] == [-0.5, 1.0, 0.5]


# ---- the whole ----


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """A small run for vLLM, with the settings that made it."""
    out = tmp_path_factory.mktemp("adapt") / "out"
    said = run("adapt", "recall", out, "--kv-budget", 0.4, "--for", "vllm", *SMALL)
    return out, said


def without_times(folder):
    """The results of the stages, but for what is a time."""
    results = {}
    for stage in STAGES:
        data = json.loads((folder / "adapt" / f"{stage}.json").read_text())
        del data["seconds"]
        if stage == "efficiency":
            for row in data["result"]["figures"].values():
                for name in [name for name in row if "second" in name]:
                    del row[name]
        results[stage] = json.loads(json.dumps(data).replace(str(folder), "OUT"))
    return results


@pytest.mark.slow
def test_the_result_keeps_the_budget_as_served(adapted, source):
    out, said = adapted
    config = json.loads((out / "vllm" / "config.json").read_text())
    windowed = config["layer_types"].count("sliding_attention")
    assert 0 < windowed < 8
    search = without_times(out)["search"]["result"]
    best = search["candidates"][search["best"]]
    assert best["share"] <= 0.4
    assert best["lost"] == min(row["lost"] for row in search["candidates"])
    command = next(line for line in said.splitlines() if line.startswith("Start it with: "))
    assert command == f"Start it with: vllm serve {out}/vllm --max-model-len 256 --max-num-batched-tokens 16"


@pytest.mark.slow
def test_a_second_run_finds_everything_done(adapted):
    out, _ = adapted
    before = without_times(out)
    said = run("adapt", "recall", out, "--kv-budget", 0.4, "--for", "vllm", *SMALL)
    assert said.count("found here") == len(STAGES)
    assert without_times(out) == before
    (out / "adapt" / "search.json").unlink()
    (out / "vllm" / "config.json").unlink()
    (out / "vllm").rename(out / "gone")
    said = run("adapt", "recall", out, "--kv-budget", 0.4, "--for", "vllm", *SMALL)
    assert said.count("found here") == len(STAGES) - 3  # the receipt lay in the export
    assert without_times(out) == before


@pytest.mark.slow
def test_the_report_links_to_nothing_and_says_how_to_serve(adapted):
    out, _ = adapted
    report = (out / "report.html").read_text()
    assert set(re.findall(r"https?://\S+", report)) == {"http://localhost:8000</code></pre>"}
    assert all(target.startswith("#") for target in re.findall(r"(?:href=\"|src=\"|url\()([^\")]*)", report))
    assert not {"@import", "<script"} & set(re.findall(r"@import|<script", report))
    assert f"vllm serve {out}/vllm --max-model-len 256" in report
    assert report.count("<svg") == 2
    assert report.count("<table") == 6
    assert f"python {out}/vllm/check_server.py --url http://localhost:8000" in report


@pytest.mark.slow
def test_another_model_is_not_mixed_in(adapted, tmp_path):
    out, _ = adapted
    model = tmp_path / "other"
    model.mkdir()
    for file in bundled("recall").iterdir():
        (model / file.name).write_bytes(file.read_bytes())
    tensors = bytearray((model / "model.safetensors").read_bytes())
    tensors[-1] ^= 1
    (model / "model.safetensors").write_bytes(tensors)
    text = ROOT / "swa_jax" / "adapt" / "stages.py"
    words = ["adapt", model, out, "--kv-budget", 0.3, "--for", "vllm", "--text", text, *SMALL]
    find_source(str(model))  # in the cache, so that the command does not say that it imports it
    assert "holds the adaptation of another model" in fails(*words)


@pytest.mark.long
def test_a_run_killed_after_every_stage_ends_as_one_that_was_not(tmp_path):
    words = ["--kv-budget", "0.3", "--for", "vllm", *map(str, SMALL), "--tune", "2", "--batch-size", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def start(out):
        command = [sys.executable, "-m", "swa_jax.cli", "adapt", "recall", str(out), *words]
        with (tmp_path / "log").open("w") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole).wait() == 0
    # Files of stages that are done, and of stages that are in the middle of their work.
    inside = {"search": ["adapt/ranked.jsonl", "adapt/candidates.jsonl"], "tune": ["tuned/checkpoints/*"]}
    kills = 0
    for wanted in [one for stage in STAGES for one in (*inside.get(stage, ()), f"adapt/{stage}.json")]:
        process = start(killed)
        deadline = time.monotonic() + 600
        while not list(killed.glob(wanted)) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert list(killed.glob(wanted)), f"no {wanted}: {(tmp_path / 'log').read_text()}"
        kills += process.poll() is None
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert kills >= 8
    assert start(killed).wait() == 0
    assert without_times(killed) == without_times(whole)
    assert (killed / "pattern.json").read_bytes() == (whole / "pattern.json").read_bytes()
    names = [sorted(str(file.relative_to(out)) for file in out.rglob("*.safetensors")) for out in (whole, killed)]
    assert names[0] == names[1]
    for name in names[0]:
        assert (whole / name).read_bytes() == (killed / name).read_bytes()
    assert not list(killed.rglob("*.partial"))


def test_fine_tuning_is_lora_under_the_pattern(tmp_path):
    job = small_job(tmp_path, tune=7)
    config = tuning(job, Path("p.json"))
    assert config.lora is not None
    assert (config.pattern, config.total_steps, config.stages[0].sequence_length) == ("p.json", 7, 256)
    assert {source.kind for source in config.stages[0].data} == {"needles", "text"}
    more = dataclasses.replace(job.settings, tune_data=("a.jsonl", "b.txt"))
    kinds = [one.kind for one in tuning(dataclasses.replace(job, settings=more), Path("p.json")).stages[0].data]
    assert kinds == ["prompts", "text"]


def test_fine_tuning_on_the_models_own_replies(tmp_path):
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "def f(x):", "answer": " return"}\n{"prompt": "import"}\n')
    job = small_job(tmp_path, tune=2, tune_prompts=questions, reply_tokens=8)
    config = tuning(job, Path("p.json"))
    (source,) = config.stages[0].data
    assert (source.kind, config.distill) == ("distilled", Distill(top_k=16))
    assert source.files == (str(tmp_path / "out/adapt/replies.jsonl"),)
    assert job.replies.keep == "none"  # not every prompt has an answer
    assert len(job.replies.samples) == 8
    assert "on 8 replies of the model to the prompts of" in estimate_text(estimate_report(job))
    questions.write_text('{"prompt": "def f(x):", "answer": " return"}\n')
    other = small_job(tmp_path, tune=2, tune_prompts=questions, reply_tokens=8)
    assert other.replies.keep == "contains"
    assert other.replies.content("") != job.replies.content("")
    for changes, sentence in [
        ({"tune": 0}, "--tune-prompts is trained on by --tune STEPS"),
        ({"tune_data": ("a.txt",)}, "give one of them"),
        (
            {"tune_prompts": None, "reply_tokens": None, "tune_data": (str(questions),), "text": (questions,)},
            "is both trained on",
        ),
        ({"tune_prompts": None}, "--reply-tokens is the length of replies to --tune-prompts"),
        (
            {"tune_prompts": None, "reply_tokens": None, "tune_data": ("a.txt",), "tune": 0},
            "--tune-data is trained on by --tune STEPS",
        ),
        ({"reply_tokens": 300}, "prompt 0 has .* longer than 256: leave it out"),
    ]:
        given = {"tune": 2, "tune_prompts": questions, "reply_tokens": 8} | changes
        with pytest.raises(ConfigError, match=sentence):
            small_job(tmp_path, **given)


@pytest.mark.slow
def test_a_run_is_tuned_on_replies_of_the_prompts_as_they_are_now(tmp_path):
    questions, out = tmp_path / "questions.jsonl", tmp_path / "out"
    questions.write_text('"def f(x):"\n"import"\n')
    words = ["--tune", 2, "--tune-prompts", questions, "--reply-tokens", 8, "--batch-size", 2]
    run("adapt", "recall", out, "--kv-budget", 0.3, *SMALL, *words)

    def found():
        replies = [json.loads(line) for line in (out / "adapt/replies.jsonl").read_text().splitlines()]
        return [reply["text"] for reply in replies], read_json(out / "adapt/tune.json")

    first, tuned = found()
    assert (len(first), tuned["result"]["replies"]) == (8, 8)
    assert "on 8 replies of the original model" in (out / "report.html").read_text()
    run("adapt", "recall", out, "--kv-budget", 0.3, *SMALL, *words)
    assert found() == (first, tuned)  # nothing is done again
    questions.write_text('"def f(x):"\n"while"\n')
    run("adapt", "recall", out, "--kv-budget", 0.3, *SMALL, *words)
    second, again = found()
    assert second[:4] == first[:4]
    assert second[4:] != first[4:]
    assert again["key"] != tuned["key"]


def test_text_that_changed_under_its_name_is_trained_on_again(tmp_path):
    text, keys = tmp_path / "text.txt", []
    for content in ("one two three\n", "one two seven\n", "one two three\n"):
        text.write_text(content * 500)
        job = small_job(tmp_path, tune=2, tune_data=(str(text),))
        keys.append(_Stages(job, StageResults(job.folder, print), "model")._tune_key("search"))
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.long
def test_single_heads(tmp_path):
    out = tmp_path / "out"
    run("adapt", "recall", out, "--kv-budget", 0.3, "--unit", "heads", *SMALL)
    pattern = json.loads((out / "pattern.json").read_text())
    assert "head_hybrid_attention" in pattern["layer_types"] or sum(map(len, pattern["full_kv_heads"])) == 0
    assert not (out / "vllm").exists()
