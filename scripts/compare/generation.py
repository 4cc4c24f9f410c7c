"""Prefill and decode of a real model beside transformers on this machine's CPU: equal threads, in turn.

    python -m scripts.compare generation --model models/SmolLM2-135M-Instruct.Q4_1.gguf \\
        --transformers .venv-servers/bin/python --cores 0,1 --prompt 4096

The model is written as a Hugging Face folder, which transformers runs as it is, with full attention. swa-jax runs the
same weights with each of `PATTERNS`; all in float32 and in processes of their own: prompts of `--prompt` tokens, then
`--new` greedy tokens. Each takes its turn `--rounds` times, and compiles before it is timed. The table has medians and
how many times faster swa-jax is; memory is the most that a process held.
`make .venv-servers/.installed` makes an environment that has transformers.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from scripts.compare.runner import ROOT, Cell, Comparison, Done, key_of, markdown
from swa_jax.checkpoint.hf_export import export_model
from swa_jax.checkpoint.hf_import import import_model

PATTERNS = ("full", "interleave-1-in-4", "window")
MEASURES = ("prefill", "decode", "gib")  # seconds, seconds a token, the most memory


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a GGUF file or Hugging Face folder, of full attention")
    parser.add_argument("--transformers", required=True, help="a Python that has torch and transformers")
    parser.add_argument("--cores", default="0,1", help="the CPU cores of both, between commas")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)


def comparison(options: argparse.Namespace) -> Comparison:
    names = ("model", "cores", "prompt", "new", "window", "chunk", "rounds")
    settings = {name: getattr(options, name) for name in names}
    cells = [Cell((one,), lambda one=one: measure(one, options), lambda: settings) for one in PATTERNS]
    return Comparison("generation", cells, lambda done: (table(done), []))


def measure(pattern: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of `MEASURES` by who computes them: "transformers", and the pattern "whole" and in "chunks"."""
    cores = {int(core) for core in options.cores.split(",")}
    own, other = Path(options.out) / "model", Path(options.out) / "hugging-face"
    import_model(options.model, own)
    if not other.exists():
        export_model(own, other, canary=False)
    job = {"prompt": [7 + i * i % 31000 for i in range(options.prompt)], "new": options.new, "window": options.window}
    runs: dict[str, dict[str, Any]] = {"transformers": {"python": options.transformers, "folder": str(other)}}
    runs["whole"] = {"folder": str(own), "pattern": pattern}
    runs["chunks"] = runs["whole"] | {"chunk": options.chunk}
    results: dict[str, list[dict[str, Any]]] = {who: [] for who in runs}
    for _ in range(options.rounds):
        for who, run in runs.items():
            told = json.dumps(job | run | {"threads": len(cores)})
            done = subprocess.run(
                [run.get("python", sys.executable), "-m", "scripts.compare.generation_worker", told],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
                cwd=ROOT,
                env=os.environ | ({"PYTHONPATH": ""} if "python" in run else {}),
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )
            results[who].append(json.loads(done.stdout.splitlines()[-1]))
    replies = {who: found[0]["reply"] for who, found in results.items()}
    assert pattern != "full" or replies["whole"] == replies["transformers"], "the replies differ"
    assert replies["chunks"] == replies["whole"][:1], "the first tokens differ"
    return {
        who: {name: statistics.median(one[name] for one in found) for name in MEASURES}
        for who, found in results.items()
    }


def table(done: Done) -> str:
    rows = []
    for pattern in PATTERNS:
        if not (found := done.get(key_of(pattern))):
            continue
        theirs, whole, chunks = (found[who] for who in ("transformers", "whole", "chunks"))
        if not rows:
            own = [f"{theirs['prefill']:.2f}", "", f"{1e3 * theirs['decode']:.1f}", f"{theirs['gib']:.2f}"]
            rows.append(["transformers, full", *own])
        prefill = [f"{one['prefill']:.2f} ({theirs['prefill'] / one['prefill']:.2f})" for one in (whole, chunks)]
        decode = f"{1e3 * whole['decode']:.1f} ({theirs['decode'] / whole['decode']:.2f})"
        rows.append([pattern, *prefill, decode, f"{whole['gib']:.2f}, in chunks {chunks['gib']:.2f}"])
    return markdown(["", "prefill, s", "in chunks, s", "decode, ms a token", "memory, GiB"], rows)
