"""Which errors a user reads as one sentence, and which keep their traceback."""

import errno
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import pytest

import swa_jax.base.settings
import swa_jax.checkpoint.safetensors_files
import swa_jax.train.processes
from pallas_kernels.math.spec import ArgumentError
from swa_jax.base.errors import CheckpointError, ConfigError, NotFiniteError, UserError, not_installed, sentence
from swa_jax.bench import tpu_kernels
from swa_jax.data.lessons import Needles
from swa_jax.data.sources import SourceConfig
from swa_jax.data.tokenize import tokenize
from swa_jax.data.tokenizer import Tokenizer, load_tokenizer, train_byte_bpe
from swa_jax.evaluate import Example, needle_examples
from swa_jax.evaluate.generated_answers import generate_answers
from swa_jax.evaluate.nll import check_examples
from swa_jax.evaluate.questions import longbench, longbench_v2

ROOT = Path(__file__).parents[2]
BROKEN = """
import swa_jax.adapt.job
from swa_jax.base.errors import ConfigError
from swa_jax.cli.__main__ import main

def prepare(_):
    raise error

swa_jax.adapt.job.prepare = prepare
for error in (ConfigError("the depth is wrong"), ZeroDivisionError("ours")):
    try:
        main()
    except SystemExit as ended:
        print(ended.code)
"""


def test_a_mistake_is_one_sentence_and_an_error_inside_the_project_shows_its_traceback():
    """Of `swa-jax demo` in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    program = [sys.executable, "-c", BROKEN, "demo"]
    ended = subprocess.run(program, env=environment, text=True, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "2\n")
    mistake, *shown = ended.stderr.splitlines()
    assert mistake == "the depth is wrong"
    assert "Traceback" in ended.stderr
    assert "ZeroDivisionError: ours" in shown[-1]


def raised(call) -> BaseException:
    with pytest.raises(Exception) as caught:
        call()
    return caught.value


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConfigError("what is wrong"), "what is wrong"),
        (CheckpointError("which file"), "which file"),
        (NotFiniteError("the loss"), "the loss"),
        (swa_jax.train.processes.LostProcess("process 3"), "process 3"),
        (ArgumentError("window is 0"), "window is 0"),
        (FileNotFoundError(errno.ENOENT, "no file", "a.txt"), "a.txt does not exist: name one that does"),
        (PermissionError(errno.EACCES, "Permission denied", "a.txt"), "a.txt may not be read or written by you"),
        (OSError(errno.ENOSPC, "No space left on device"), "the disk is full (No space left on device): make room, "
         "and start the same command again"),
        (OSError(errno.ENOSPC, "No space left on device", "a.txt"),
         "the disk of a.txt is full (No space left on device): make room, and start the same command again"),
        (OSError(errno.EFBIG, "File too large", "a.txt"), "the file a.txt reaches the largest size that is allowed "
         "here (File too large): raise it (ulimit -f unlimited), and start the same command again"),
        (OSError("Not enough free space to write 9 bytes after offset 1"), "the disk is full (Not enough free space to "
         "write): make room, and start the same command again"),
        # TensorStore says it in a ValueError.
        (ValueError("Error writing: RESOURCE_EXHAUSTED: write: No space left on device"),
         "the disk is full (No space left on device): make room, and start the same command again"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "the disk is full (Disk quota exceeded): make room, and start "
         "the same command again"),
        (OSError(errno.EFBIG, "File too large"), "a file reaches the largest size that is allowed here "
         "(File too large): raise it (ulimit -f unlimited), and start the same command again"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9.96GiB.\nA dump"),
         "the memory of the device does not suffice (Out of memory while trying to allocate 9.96GiB): take fewer "
         "sequences at once (--batch-size or --slots, in training stages[].accumulate), a shorter length or --dtype "
         "bfloat16, whichever the command has; docs/start-gpu.md says more"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: E1001:\nRan out of memory in memory space vmem while"), None),
        (jax.errors.JaxRuntimeError("INTERNAL: ours"), None),
        (ValueError("an internal contract"), None),
        (FloatingPointError("divide by zero encountered in divide"), None),
        (FileNotFoundError("without a file name"), None),
        (OSError(errno.EBADF, "Bad file descriptor"), None),
        (RuntimeError("No such thing"), None),
        (KeyError("key"), None),
        (KeyboardInterrupt(), None),
        (raised(lambda: b"\xff".decode()), None),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, BaseException) else "",
)  # fmt: skip
def test_sentences(error, words):
    assert sentence(error) == words


def test_our_classes_are_few_and_are_value_errors():
    assert issubclass(UserError, ValueError)
    assert issubclass(ConfigError, UserError)
    assert issubclass(CheckpointError, ConfigError)
    assert issubclass(NotFiniteError, FloatingPointError)
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(swa_jax.train.processes.ProcessError, UserError)


MODEL = None  # is not asked: the arguments are looked at first
TOKENIZER = train_byte_bpe(["the quick brown fox"], 260)


def trace(program):
    function, arguments = program
    return jax.eval_shape(function, *arguments)


def _needles(**options):
    settings = {"length": 200, "num_examples": 1} | options
    return lambda: needle_examples(TOKENIZER, **settings)


MISTAKES = {
    "a depth that is no share": (_needles(depths=[2.0]), "depths must be fractions"),
    "needles longer than the prompt": (_needles(length=20), "length is 20 tokens"),
    "nothing to generate from": (lambda: generate_answers(MODEL, TOKENIZER, [], max_new_tokens=1), "examples is empty"),
    "an empty prompt": (lambda: check_examples([Example((), (1,), ())]), r"examples\[0\] has an empty prompt"),
    "an end of text that is none": (lambda: Tokenizer(TOKENIZER.backend, "<|no|>"), "has no token '<|no|>'"),
    "a vocabulary below the bytes": (lambda: train_byte_bpe(["a"], 200), "vocab_size is 200"),
    "more questions than needles": (
        lambda: Needles(TOKENIZER, None, length=64, seed=0, num_keys=1, num_questions=2),
        "num_questions is 2",
    ),
    "a length of part of a block": (lambda: trace(tpu_kernels.window_forward(T=1000, window=128)), "T is 1000"),
    "no tokenizer": (lambda: load_tokenizer("absent"), r"no tokenizer at absent; expected a tokenizer\.json"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_that_a_user_can_make_have_a_sentence(mistake):
    call, words = MISTAKES[mistake]
    with pytest.raises(ValueError, match=words) as caught:
        call()
    assert sentence(caught.value) == str(caught.value)


def _tokenizer_folder(folder):
    TOKENIZER.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{")
    load_tokenizer(folder)


def _records(folder):
    (folder / "v2.json").write_bytes(b"\xff\xfe{}")
    longbench_v2(folder / "v2.json")


def _prompts(folder):
    (folder / "prompts.json").write_text("[]")
    (folder / "musique.jsonl").write_text("{}")
    longbench(folder / "musique.jsonl", folder / "prompts.json")


def _interrupted(folder):
    TOKENIZER.backend.save(str(folder / "tokenizer.json"))
    (folder / "a.txt").write_text("text")
    (folder / "out").mkdir()
    (folder / "out" / "unfinished.json").write_text('{"shards": [')
    tokenize(SourceConfig(files=(str(folder / "a.txt"),)), folder / "tokenizer.json", folder / "out")


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (_tokenizer_folder, "tokenizer_config.json is not valid JSON: "),
        (_records, "v2.json.* is not UTF-8: "),
        (_prompts, "prompts.json must hold a JSON object"),
        (_interrupted, "unfinished.json is not valid JSON: "),
    ],
)
def test_files_that_are_no_json_are_named(tmp_path, read, words):
    with pytest.raises(ConfigError, match=words) as caught:
        read(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_advice_to_install_works_from_a_clone():
    """The project is on no index: what is advised is an extra of this repository, and one that there is."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    text = "".join(file.read_text() for file in ROOT.glob("swa_jax/**/*.py"))
    assert "install 'swa-jax" not in text
    asked = set(re.findall(r"""not_installed\([^)]*extra="(\w+)"\)""", text))
    assert asked == {"data", "eval", "logging", "nomad"}
    assert asked <= set(extras)
    assert str(not_installed("--harness needs lm-eval", extra="eval")) == (
        "--harness needs lm-eval, which is not installed: run pip install -e '.[eval]' in the folder of the "
        "swa-jax repository"
    )
