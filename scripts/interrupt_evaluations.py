"""Interrupt evaluations and selections at random moments and check that they end with the same numbers.

    python scripts/interrupt_evaluations.py --times 20 --seed 0 --json interruptions.json

Each command runs once undisturbed. Then it runs in another folder, is sent SIGKILL, SIGTERM or SIGINT (Ctrl-C) at a
random moment, and is started again, until it has been interrupted often enough and has finished. It is an error if a
command fails when it is started again, or if what it writes differs in anything but times.
"""

import argparse
import collections
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CLI = (sys.executable, "-m", "swa_jax.cli")
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
PROMPTS = ("--chains", "hops=1-2,rivals=2,gap=16", "--length", 128, "--window", 16, "--dtype", "float32")


class Command(NamedTuple):
    """A command line, where MODEL and OUT stand for the model and the folder of results, and what it writes there."""

    words: tuple[Any, ...]
    results: tuple[str, ...]


COMMANDS = {
    "evaluate chains": Command(
        (*CLI, "evaluate", "chains", "MODEL", "--hops", "1,2", "--rivals", "1,3", "--lengths", 128, "--examples", 24,
         "--batch-size", 4, "--pattern", "full", "--pattern", "window", "--window", 16, "--gap", 16, "--out", "OUT"),
        ("*.json", "*.jsonl"),
    ),
    "evaluate text": Command(
        (*CLI, "evaluate", "text", "MODEL", ROOT / "LICENSE", "--pattern", "window", "--window", 16,
         "--lengths", "128,256", "--eval-windows", "16,32,full", "--batch-size", 4, "--out", "OUT"),
        ("*.json",),
    ),
    "select nll": Command(
        (*CLI, "select", "nll", "MODEL", *PROMPTS, "--one-in", 2, "--examples", 24, "--batch-size", 4,
         "--resume-file", "OUT/scores.jsonl", "--out", "OUT/nll.json", "--force"),
        ("nll.json",),
    ),
    "select bosch": Command(
        (*CLI, "select", "bosch", "MODEL", *PROMPTS, "--ratio", 0.5, "--examples", 12, "--iterations", 4,
         "--out", "OUT/bosch.json", "--force"),
        ("bosch.json",),
    ),
    "compare": Command(
        (*CLI, "compare", "MODEL", *PROMPTS, "--method", "nll", "--method", "bosch", "--method", "interleave",
         "--ratio", 0.5, "--seeds", 2, "--iterations", 2, "--examples", 8, "--held-out", 24, "--out", "OUT", "--force"),
        ("results.json", "patterns/*.json"),
    ),
    "compare_plants": Command(
        (sys.executable, ROOT / "scripts" / "compare_plants.py", "--out", "OUT", "--method", "nll", "--method", "bosch",
         "--placement", "whole layers", "--seeds", 2, "--examples", 8),
        ("cells.jsonl",),
    ),
    "chains_card": Command(
        (sys.executable, ROOT / "scripts" / "chains_card.py", "MODEL", "--out", "OUT", "--hops", "1,2", "--rivals", "2",
         "--lengths", 128, "--window", 16, "--examples", 8),
        ("card.json", "card.md"),
    ),
}  # fmt: skip


class Ended(NamedTuple):
    status: int
    interrupted: bool
    seconds: float
    output: str


def run(command: Command, model: Path, out: Path, *, stop: tuple[float, signal.Signals] | None = None) -> Ended:
    """Run a command to its end, or send it a signal after so many seconds."""
    out.mkdir(parents=True, exist_ok=True)
    words = [str(word).replace("MODEL", str(model)).replace("OUT", str(out)) for word in command.words]
    begun = time.monotonic()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryFile("w+") as printed:
        process = subprocess.Popen(words, stdout=printed, stderr=subprocess.STDOUT, env=environment, cwd=out.parent)
        interrupted = False
        if stop is not None:
            try:
                process.wait(stop[0])
            except subprocess.TimeoutExpired:
                process.send_signal(stop[1])
                interrupted = True
        status = process.wait()
        printed.seek(0)
        return Ended(status, interrupted, time.monotonic() - begun, printed.read())


def results(command: Command, out: Path) -> dict[str, Any]:
    """What a command has written, by file, without times."""
    found = {}
    for file in sorted(path for pattern in command.results for path in out.glob(pattern)):
        text = file.read_text()
        if file.suffix == ".json":
            value: Any = json.loads(text)
        elif file.suffix == ".jsonl":
            value = [json.loads(line) for line in text.splitlines()]
        else:
            value = text
        found[str(file.relative_to(out))] = _timeless(value)
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(one) for key, one in value.items() if "second" not in key}
    return [_timeless(one) for one in value] if isinstance(value, list) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--command", action="append", choices=list(COMMANDS), help="default: all, in turn")
    parser.add_argument("--model", type=Path, help="a checkpoint of chains; default: the bundled model")
    parser.add_argument("--json", type=Path, help="write what happened")
    options = parser.parse_args()
    rng, errors = random.Random(options.seed), []
    happened: collections.Counter[str] = collections.Counter()
    names = options.command or list(COMMANDS)
    with tempfile.TemporaryDirectory() as folder:
        model = options.model.resolve() if options.model else _bundled(Path(folder))
        expected, seconds = {}, {}
        for name in names:
            whole = run(COMMANDS[name], model, Path(folder) / "whole" / name.replace(" ", "-"))
            if whole.status:
                sys.exit(f"{name} fails by itself:\n{whole.output}")
            expected[name] = results(COMMANDS[name], Path(folder) / "whole" / name.replace(" ", "-"))
            seconds[name] = whole.seconds
            print(f"{name}: {whole.seconds:.0f} s, {len(expected[name])} files", flush=True)
        shares = [options.times // len(names) + (i < options.times % len(names)) for i in range(len(names))]
        for name, times in zip(names, shares, strict=True):
            out, left = Path(folder) / "stopped" / name.replace(" ", "-"), times
            while left:
                kind = rng.choice(SIGNALS)
                ended = run(COMMANDS[name], model, out, stop=(rng.uniform(0.2, 1) * seconds[name], kind))
                if not ended.interrupted:  # it had finished: another one begins
                    shutil.rmtree(out)
                    continue
                left -= 1
                happened[f"{name}, {kind.name}"] += 1
            last = run(COMMANDS[name], model, out)
            if last.status:
                errors.append(f"{name}, started again, ends with status {last.status}:\n{last.output[-2000:]}")
            elif (got := results(COMMANDS[name], out)) != expected[name]:
                files = [file for file in {*got, *expected[name]} if got.get(file) != expected[name].get(file)]
                errors.append(f"{name}, interrupted, writes other numbers: {', '.join(sorted(files))}")
            print(f"{name}: interrupted {times} times, {'ok' if not errors else errors[-1]}", flush=True)
    report = {"interrupted": dict(happened), "errors": errors, "seed": options.seed}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    print(f"{sum(happened.values())} interruptions, {len(errors)} errors")
    sys.exit(1 if errors else 0)


def _bundled(folder: Path) -> Path:
    model = folder / "model"
    subprocess.run([*CLI, "import", ROOT / "swa_jax" / "chains", model], check=True, stdout=subprocess.DEVNULL)
    return model


if __name__ == "__main__":
    main()
