"""One command of a page, run in small: `swa-jax`, `python`, `make` and `pip` while test_commands.py runs a page.

    python shrunk_command.py swa-jax select bosch checkpoints/qwen3 --length 8192 ...

A command runs as it stands, but for the replacements of the tables below. What was run, its status and what is wrong
with it go, as one line of JSON, to the file that the environment variable COMMANDS names.
"""

import functools
import itertools
import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import typer
import yaml

from swa_jax.model.recipes import PUBLISHED

# The largest number that an option may have, in every command that has the option: larger ones, and defaults, are
# replaced by it. Equal lengths and examples also mean programs that one command compiles for all that follow.
MOST = {
    "--length": 512,
    "--lengths": 512,
    "--text-length": 512,
    "--examples": 2,
    "--choose-by": 2,
    "--tune": 1,
    "--held-out": 4,
    "--seeds": 1,
    "--iterations": 1,
    "--window": 48,
    "--last": 16,
    "--recent": 40,
    "--rounds": 1,
    "--new-tokens": 8,
    "--max-new-tokens": 8,
    "--count": 3,
    "--megabytes": 60,
    "--tries": 1,
    "--options": 0,
}
# How often an option may be repeated: the first ones stay, and all files, because a page may name a wrong one.
REPEATS = {"--pattern": 2, "--chip": 1, "--ratio": 2}
# Words that stand for others. A model of the Hub is the bundled one, which has the same format and finds needles. A
# model that a page trains has made one step here and answers nothing, so that methods cannot choose by its answers.
INSTEAD = {
    "Qwen/Qwen3-0.6B": "swa_jax/recall",
    "hf://Qwen/Qwen3-0.6B@main": "swa_jax/recall",
    "models/SmolLM2-135M-Instruct.Q4_1.gguf": "recall",
    "models/gemma-3-270m-q4_k_m.gguf": "recall",
    "runs/chains-1/model": "chains",
    "runs/chains-2/model": "chains",
    **dict.fromkeys(PUBLISHED, "layers:2"),
}
# What is added to every command that begins so.
ADDED = {
    "python -m launch.tpu_vm": ["--dry-run"],  # no cloud here
    "python -m launch.gke": ["--dry-run"],
    "python -m scripts.compare swiattn": ["--tiny", "--only", "swiattn", "swa-cpt"],
    "python -m scripts.compare swiattn-chains": ["--tiny", "--only", "swiattn", "swa-cpt"],
    "python -m scripts.compare swiattn-ablations": ["--tiny", "--only", "swiattn", "V1, gamma = base"],
    "python -m scripts.compare swat": ["--tiny", "--only", "vanilla 32", "sliding 32"],
    "python -m scripts.compare swat-longer": ["--tiny", "--only", "sliding 32, Muon"],
    "python -m scripts.compare swaa": ["--tiny", "--limit", "2"],
    "python -m scripts.compare windows": ["--tiny", "--only", "window 4"],
    "python -m scripts.compare peers": ["--limit", "1"],
    "python -m scripts.compare plants": ["--only", "kl", "--placement", "chains", "--seeds", "0"],
    "python -m scripts.compare card": ["--hops", "1", "--rivals", "1", "--length", "128"],
    "python -m scripts.train_chains": ["--steps", "1"],
    "python -m scripts.faults plant": ["--list"],  # hours
    "python -m scripts.faults draw": ["--list"],
    "python -m scripts.device": ["--dry-run"],  # no GPU here
    # One small layer; the pattern of qwen3-8b.yaml is for 36.
    "swa-jax compile configs/bosch/qwen3-8b.yaml": [
        "init_from=null",
        "model=@configs/models/qwen3-8b.yaml",
        "pattern=window",
    ],
    # Its model is one that `make models` fetches.
    "swa-jax train configs/swiattn/cpt-smollm2.yaml": ["init_from=recall", "tokenizer=recall"],
    "swa-jax compile configs/swiattn/cpt-32k.yaml": ["init_from=null", "model=@configs/models/swiattn-1.5b.yaml"],
    "swa-jax compile": [
        "model.num_hidden_layers=1",
        "model.hidden_size=256",
        "model.intermediate_size=256",
        "model.vocab_size=1024",
    ],
    "swa-jax evaluate ruler": ["--lengths", "1536"],  # the last one counts: room for the lists of words
    # A few prompts of a model that was made in one step tell nothing.
    "swa-jax adapt": ["--force"],
    "swa-jax compare": ["--force"],
    "swa-jax select": ["--force"],
    "make": ["--dry-run"],  # what they would run has tests of its own; the target must be there
}
STEPS = 1  # of each stage, wherever something trains
# Commands that are not run, by how they begin: why not.
NOT_RUN = {
    "pip install": "nothing is downloaded in tests",
    "python checkpoints/qwen3-vllm/check_server.py": "there is no server; tests/checkpoint plants some",
    "python -m pytest -n 8": "it needs an NVIDIA GPU",
    "swa-jax export checkpoints/qwen3 checkpoints/qwen3-gguf": "llama.cpp has no tokenizer such as the stand-in's",
    "python -m scripts.goldens": "it needs torch and transformers",
    "python -m scripts.compare chips": "the timings are in tokamax, which is no dependency",
    "swa-jax evaluate harness": "lm-evaluation-harness is no dependency, and its tasks fetch data",
}
# Compiling for a pod takes a minute and more. A command that stands in this page too is run there only.
ONCE = {"swa-jax compile": "docs/planning.md"}


def starts(words: list[str], beginning: str) -> bool:
    return words[: len(beginning.split())] == beginning.split()


def reason_not_to_run(words: list[str], page: str = "") -> str | None:
    for beginning, home in ONCE.items():
        if starts(words, beginning) and page != home and shlex.join(words) in Path(home).read_text():
            return f"{home} has the same command"
    return next((reason for beginning, reason in NOT_RUN.items() if starts(words, beginning)), None)


def lower(value: str, most: int) -> str:
    """Numbers above `most` in a value such as 4096,16384 become `most`, once."""
    numbers = [str(min(int(v), most)) if v.isdigit() else v for v in value.split(",")]
    return ",".join(dict.fromkeys(numbers))


@functools.cache
def command_line():
    from swa_jax.cli.main import app

    return typer.main.get_command(app)


def options_of(words: list[str]) -> set[str]:
    """The options of the verb of a `swa-jax` command; `select MODEL` has those of the default method."""
    from swa_jax.select.methods import DEFAULT

    command = command_line()
    for word in words[1:]:
        if not hasattr(command, "commands") or word not in command.commands:
            break
        command = command.commands[word]
    if words[1] == "select" and hasattr(command, "commands"):
        command = command.commands[DEFAULT["layers"]]
    return {option for parameter in command.params for option in parameter.opts}


def stages_of(file: str) -> int:
    settings = yaml.safe_load(Path(file).read_text())
    if "stages" in settings:
        return len(settings["stages"])
    return stages_of(str(Path(file).parent / settings["base"]))


def key_and_value(word: str) -> tuple[str, str]:
    """`init_from=MODEL` in its two parts; any other word is a value."""
    key, equals, value = word.rpartition("=")
    return key + equals, value


def shrink(words: list[str]) -> list[str]:
    """The command to run in place of `words`."""
    words = [key + INSTEAD.get(value, value) for key, value in map(key_and_value, words)]
    for i, word in enumerate(words[:-1]):
        if word in MOST:
            words[i + 1] = lower(words[i + 1], MOST[word])
    for option, most in REPEATS.items():
        places = [i for i, word in enumerate(words[:-1]) if word == option]
        for i in reversed(places[most:]):
            if not words[i + 1].endswith(".json"):
                del words[i : i + 2]
    for beginning, addition in ADDED.items():
        if starts(words, beginning):
            words += addition
    if words[0] == "swa-jax":
        options = options_of(words)
        if words[1] in ("adapt", "evaluate", "select", "compare", "bench"):
            for option in sorted(options & MOST.keys() - set(words) - {"--window", "--tune"}):
                words += [option, str(MOST[option])]
        if "--dtype" in options - set(words):  # faster on a CPU
            words += ["--dtype", "float32"]
    if starts(words, "swa-jax train") or starts(words, "python -m launch.local"):
        file = next(i for i, word in enumerate(words) if word.endswith(".yaml"))
        steps = [f"stages.{i}.steps={STEPS}" for i in range(stages_of(words[file]))]
        own = [word for word in words if ".steps=" not in word]
        words = [*own[: file + 1], *steps, *own[file + 1 :]]
    return words


def problem_of(words: list[str], ran: subprocess.CompletedProcess) -> str | None:
    """What is wrong with what a command did, or None."""
    text = ran.stdout + ran.stderr
    if ran.returncode:
        return f"exit status {ran.returncode}"
    if "Traceback" in text:
        return "a traceback"
    if not text.strip():
        return "prints nothing"
    for option, value in itertools.pairwise(words):
        if option == "--out" and not Path(value).exists():
            return f"there is no {value}"
    return None


def main(words: list[str]) -> int:
    line = {"command": shlex.join(words), "not run": reason_not_to_run(words, os.environ["PAGE"])}
    status = 0
    if line["not run"] is None:
        small = shrink(words)
        programs = {"swa-jax": [sys.executable, "-m", "swa_jax.cli"], "python": [sys.executable]}
        ran = subprocess.run(
            [*programs.get(small[0], ["/usr/bin/" + small[0]]), *small[1:]], capture_output=True, text=True
        )
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        line["seconds"] = used.ru_utime + used.ru_stime
        sys.stdout.write(ran.stdout)
        sys.stderr.write(ran.stderr)
        status, line["ran"], line["problem"] = ran.returncode, shlex.join(small), problem_of(small, ran)
        line["end"] = (ran.stdout + ran.stderr)[-3000:]
    with open(os.environ["COMMANDS"], "a") as file:
        file.write(json.dumps(line) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
