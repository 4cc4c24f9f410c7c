"""Prefill and decode beside transformers on this machine's CPU: equal threads, in turn, as a ratio in one run.

    python -m scripts.compare generation --transformers /tmp/oracle/bin/python --cores 0,1

A random Qwen3 is written as a Hugging Face folder and run by both in processes of their own: prompts of `--prompt`
tokens, then `--new` greedy tokens, in float32. Each takes its turn `--rounds` times, and compiles before it is timed;
the table has the medians and how many times faster swa-jax is.
`python -m scripts.goldens --help` says how to make the environment that --transformers names.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts.compare.runner import ROOT, Cell, Comparison, Done, key_of, markdown
from scripts.random_model import write_random_model

SIZES: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 32000}
SIZES |= {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
SIZES |= {"num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6}
SIZES |= {"rope_theta": 1000000.0, "tie_word_embeddings": True, "use_sliding_window": True, "max_window_layers": 0}
WINDOW, FULL = "sliding_attention", "full_attention"
MODES = {"full": [FULL] * 8, "window": [WINDOW] * 8, "interleave": [WINDOW, FULL] * 4}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transformers", required=True, help="a Python that has torch and transformers")
    parser.add_argument("--cores", default="0,1", help="the CPU cores of both, between commas")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)


def comparison(options: argparse.Namespace) -> Comparison:
    settings = {name: getattr(options, name) for name in ("cores", "prompt", "new", "window", "chunk", "rounds")}
    cells = [Cell((mode,), lambda mode=mode: measure(mode, options), lambda: settings) for mode in MODES]
    return Comparison("generation", cells, lambda done: (table(done), []))


def measure(mode: str, options: argparse.Namespace) -> dict[str, Any]:
    """Median seconds of prefill and of a token of decode, by who computes them."""
    cores = {int(core) for core in options.cores.split(",")}
    job = {"prompt": [7 + i * i % 31000 for i in range(options.prompt)], "new": options.new, "chunk": options.chunk}
    pythons = {"ours": sys.executable, "chunks": sys.executable, "transformers": options.transformers}
    results: dict[str, list] = {who: [] for who in pythons}
    with tempfile.TemporaryDirectory() as scratch:
        config = SIZES | {"layer_types": MODES[mode], "sliding_window": options.window, "dtype": "float32"}
        model = write_random_model(Path(scratch) / "model", config)
        for _ in range(options.rounds):
            for who, python in pythons.items():
                told = json.dumps(job | {"who": who, "folder": str(model), "threads": len(cores)})
                done = subprocess.run(
                    [python, "-m", "scripts.compare.generation_worker", told],
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                    cwd=ROOT,
                    env=os.environ | ({"PYTHONPATH": ""} if who == "transformers" else {}),
                    preexec_fn=lambda: os.sched_setaffinity(0, cores),
                )
                results[who].append(json.loads(done.stdout.splitlines()[-1]))
    replies = {who: found[0][2] for who, found in results.items()}
    assert replies["ours"] == replies["transformers"], "the replies differ"
    assert replies["chunks"] == replies["ours"][:1], "the first tokens differ"
    return {who: [statistics.median(one[i] for one in found) for i in (0, 1)] for who, found in results.items()}


def table(done: Done) -> str:
    rows = []
    for mode in MODES:
        if found := done.get(key_of(mode)):
            ours, chunks, other = found["ours"], found["chunks"], found["transformers"]
            faster = f"prefill {other[0] / ours[0]:.2f}, in chunks {other[0] / chunks[0]:.2f}"
            faster += f", decode {other[1] / ours[1]:.2f}"
            own = f"{ours[0]:.2f}, {chunks[0]:.2f}, {1e3 * ours[1]:.1f}"
            rows.append([mode, own, f"{other[0]:.2f}, {1e3 * other[1]:.1f}", faster])
    head = ["layers", "ours: prefill s, in chunks s, ms a token", "transformers: prefill s, ms a token", "times faster"]
    return markdown(head, rows)
