"""One command of a page, run in small: what `swa-jax`, `python`, `make` and `pip` are while test_commands.py runs a page.

    python shrunk_command.py swa-jax select bosch checkpoints/qwen3 --length 8192 ...

A command runs as it stands, but for the replacements of the tables below. What was run, its status and what is wrong
with it go, as one line of JSON, to the file that the environment variable COMMANDS names.
"""

import functools
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import typer
import yaml

# The largest number that an option may have, in every command that has the option: larger ones, and defaults, are
# replaced by it. Equal lengths and examples also mean programs that one command compiles for all that follow.
MOST = {
    "--length": 512,
    "--lengths": 512,
    "--text-length": 512,
    "--examples": 2,
    "--held-out": 4,
    "--seeds": 1,
    "--iterations": 1,
    "--window": 48,
    "--last": 16,
    "--rounds": 1,
    "--new-tokens": 8,
    "--max-new-tokens": 8,
    "--kills": 1,
    "--terms": 1,
    "--count": 3,
}
# Words that stand for others, wherever they are. A model from the Hub is the bundled one: it has Qwen3's format, and finds.
INSTEAD = {"Qwen/Qwen3-0.6B": "swa_jax/recall"}
# What is added to every command that begins so.
ADDED = {
    "python -m launch.tpu_vm": ["--dry-run"],  # no cloud here
    "python -m launch.gke": ["--dry-run"],
    "python scripts/compare_training.py swiattn": ["--tiny", "--arms", "swiattn", "swa-cpt"],
    "python scripts/compare_training.py swat": ["--tiny", "--arms", "vanilla 32", "sliding 32"],
    "python scripts/plant_faults.py": ["--list"],  # hours
    "make": ["--dry-run"],  # what they would run has tests of its own; the target must be there
}
STEPS = 1  # of each stage, wherever something trains
# Commands that are not run, by how they begin: why not.
NOT_RUN = {
    "pip install": "nothing is downloaded in tests",
    "swa-jax compile": "to be done",
    "swa-jax evaluate harness": "lm-evaluation-harness is no dependency, and its tasks fetch data",
}


def starts(words: list[str], beginning: str) -> bool:
    return words[: len(beginning.split())] == beginning.split()


def reason_not_to_run(words: list[str]) -> str | None:
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
    """The options of the verb of a `swa-jax` command."""
    command = command_line()
    for word in words[1:]:
        if not hasattr(command, "commands") or word not in command.commands:
            break
        command = command.commands[word]
    return {option for parameter in command.params for option in parameter.opts}


def stages_of(file: str) -> int:
    settings = yaml.safe_load(Path(file).read_text())
    if "stages" in settings:
        return len(settings["stages"])
    return stages_of(str(Path(file).parent / settings["base"]))


def shrink(words: list[str]) -> list[str]:
    """The command to run in place of `words`."""
    words = [INSTEAD.get(word, word) for word in words]
    for i, word in enumerate(words[:-1]):
        if word in MOST:
            words[i + 1] = lower(words[i + 1], MOST[word])
    for beginning, addition in ADDED.items():
        if starts(words, beginning):
            words += addition
    if words[0] == "swa-jax":
        options = options_of(words)
        if words[1] in ("evaluate", "select", "compare", "bench"):
            for option in sorted(options & MOST.keys() - set(words) - {"--window"}):
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
    for option, value in zip(words, words[1:], strict=False):
        if option == "--out" and not Path(value).exists():
            return f"there is no {value}"
    return None


def main(words: list[str]) -> int:
    line = {"command": shlex.join(words), "not run": reason_not_to_run(words)}
    status = 0
    if line["not run"] is None:
        small = shrink(words)
        programs = {"swa-jax": [sys.executable, "-m", "swa_jax.cli"], "python": [sys.executable]}
        start = time.perf_counter()
        ran = subprocess.run(
            [*programs.get(small[0], ["/usr/bin/" + small[0]]), *small[1:]], capture_output=True, text=True
        )
        line["seconds"] = time.perf_counter() - start
        sys.stdout.write(ran.stdout)
        sys.stderr.write(ran.stderr)
        status, line["ran"], line["problem"] = ran.returncode, shlex.join(small), problem_of(small, ran)
        line["end"] = (ran.stdout + ran.stderr)[-3000:]
    with open(os.environ["COMMANDS"], "a") as file:
        file.write(json.dumps(line) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
