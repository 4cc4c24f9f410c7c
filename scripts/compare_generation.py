"""Prefill and decode beside transformers on this machine's CPU: equal threads, in turn, as a ratio in one run.

    python scripts/compare_generation.py --transformers /tmp/oracle/bin/python --cores 0,1

A random Qwen3 with windows in every second layer is written as a Hugging Face folder, imported, and run by both in
processes of their own: prompts of `--prompt` tokens, then `--new` greedy tokens, in float32. Each takes its turn
`--rounds` times after one that compiles; the table has the medians and how many times faster swa-jax is.
scripts/make_goldens.py says how to make the environment that --transformers names.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIZES = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "use_sliding_window": True,
}
MODES = ("full", "window", "interleave")


def layer_types(mode: str) -> list[str]:
    window, full = "sliding_attention", "full_attention"
    kinds = {"full": [full], "window": [window], "interleave": [window, full]}[mode]
    return [kinds[i % len(kinds)] for i in range(SIZES["num_hidden_layers"])]


def work_with_jax(folder: Path, prompt: list[int], new: int, chunk: int | None) -> None:
    import jax
    import numpy as np

    from swa_jax.checkpoint.folder import load_model
    from swa_jax.checkpoint.hf_import import import_model
    from swa_jax.model.engine import Engine
    from swa_jax.model.generate import decode, prefill, prepare

    model = load_model(import_model(folder, folder.with_name(folder.name + "-imported")))

    def once() -> tuple[float, float, list[int]]:
        if chunk is not None:
            engine = Engine(model, slots=1, max_length=len(prompt) + new, chunk=chunk, steps=new)
            start = time.perf_counter()
            stream = engine.stream([prompt], max_new_tokens=1)
            first = next(stream).tokens
            middle = time.perf_counter()
            return middle - start, float("nan"), first
        batch = prepare(model, [prompt], new)
        start = time.perf_counter()
        logits, cache = jax.block_until_ready(prefill(model, batch))
        middle = time.perf_counter()
        tokens = np.asarray(decode(model, batch, logits, cache, new)[0])[0].tolist()
        return middle - start, (time.perf_counter() - middle) / (new - 1), tokens

    serve(once)


def work_with_transformers(folder: Path, prompt: list[int], new: int, threads: int) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32).eval()
    tokens = torch.tensor([prompt])

    def generate(count: int) -> tuple[float, list[int]]:
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )
        return time.perf_counter() - start, out[0, len(prompt) :].tolist()

    def once() -> tuple[float, float, list[int]]:
        first, _ = generate(1)
        whole, reply = generate(new)
        return first, (whole - first) / (new - 1), reply

    serve(once)


def serve(once) -> None:
    """One measurement for each line that comes in."""
    for _ in sys.stdin:
        print("RESULT " + json.dumps(once()), flush=True)


def write_model(folder: Path, mode: str, window: int) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    from swa_jax.checkpoint.tensor_names import expected_tensors
    from swa_jax.families import model_config

    config = SIZES | {"layer_types": layer_types(mode), "sliding_window": window, "dtype": "float32"}
    config |= {"max_window_layers": 0}
    rng = np.random.default_rng(0)
    tensors = {
        name: (np.ones(shape) if len(shape) == 1 else rng.normal(0, 0.05, shape)).astype(np.float32)
        for name, shape in expected_tensors(model_config(config)).items()
    }
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--transformers", required=True, help="a Python that has torch and transformers")
    parser.add_argument("--cores", default="0,1", help="the CPU cores of both, between commas")
    parser.add_argument("--prompt", type=int, default=4096)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        job = json.loads(options.work)
        folder = Path(job["folder"])
        if job["who"] == "transformers":
            work_with_transformers(folder, job["prompt"], job["new"], job["threads"])
        else:
            work_with_jax(folder, job["prompt"], job["new"], job["chunk"])
        return
    print("| layers | ours: prefill s, in chunks s, ms a token | transformers: prefill s, ms a token | times faster |")
    print("|---|---|---|---|")
    for mode in MODES:
        print(row(mode, options), flush=True)


def row(mode: str, options: argparse.Namespace) -> str:
    cores = {int(core) for core in options.cores.split(",")}
    prompt = [7 + i * i % 31000 for i in range(options.prompt)]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        write_model(folder, mode, options.window)
        workers = {}
        for who, python, chunk in (
            ("ours", sys.executable, None),
            ("chunks", sys.executable, options.chunk),
            ("transformers", options.transformers, None),
        ):
            target = Path(scratch) / who
            target.symlink_to(folder)
            job = {"who": who, "folder": str(target), "prompt": prompt, "new": options.new, "chunk": chunk}
            job["threads"] = len(cores)
            command = [python, __file__, "--transformers", "none", "--work", json.dumps(job)]
            workers[who] = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=os.environ | ({"PYTHONPATH": ""} if who == "transformers" else {}),
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )
        results: dict[str, list] = {who: [] for who in workers}
        for _ in range(1 + options.rounds):  # the first compiles
            for who, worker in workers.items():
                results[who].append(ask(worker))
        for worker in workers.values():
            worker.stdin.close()
            worker.wait()
    assert results["ours"][0][2] == results["transformers"][0][2], "the replies differ"
    assert results["chunks"][0][2] == results["ours"][0][2][:1], "the first tokens differ"
    middle = {who: [statistics.median(one[i] for one in found[1:]) for i in (0, 1)] for who, found in results.items()}
    ours, chunks, other = middle["ours"], middle["chunks"], middle["transformers"]
    return (
        f"| {mode} | {ours[0]:.2f}, {chunks[0]:.2f}, {1e3 * ours[1]:.1f} | {other[0]:.2f}, {1e3 * other[1]:.1f} | "
        f"prefill {other[0] / ours[0]:.2f}, in chunks {other[0] / chunks[0]:.2f}, decode {other[1] / ours[1]:.2f} |"
    )


def ask(worker: subprocess.Popen) -> list:
    worker.stdin.write("go\n")
    worker.stdin.flush()
    for line in worker.stdout:
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    raise SystemExit("a worker has ended: run it with --work to see why")


if __name__ == "__main__":
    main()
