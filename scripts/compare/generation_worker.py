"""What `generation.py` starts: a model that generates twice, by swa-jax or transformers; the second time counts."""

import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

Once = Callable[[], tuple[float, float, list[int]]]  # seconds of prefill, and of a token of decode; the reply


def by_jax(folder: Path, pattern: str, window: int, prompt: list[int], new: int, chunk: int | None) -> Once:
    import jax
    import numpy as np

    from swa_jax import load_model
    from swa_jax.model.engine import Engine
    from swa_jax.model.generate import decode, prefill, prepare

    model = load_model(folder, pattern, window=None if pattern == "full" else window, dtype="float32")

    def in_chunks() -> tuple[float, float, list[int]]:
        engine = Engine(model, slots=1, max_length=len(prompt) + new, chunk=chunk, steps=new)
        start = time.perf_counter()
        first = next(engine.stream([prompt], max_new_tokens=1)).tokens
        return time.perf_counter() - start, float("nan"), first

    def once() -> tuple[float, float, list[int]]:
        batch = prepare(model, [prompt], new)
        start = time.perf_counter()
        logits, cache = jax.block_until_ready(prefill(model, batch))
        middle = time.perf_counter()
        tokens = np.asarray(decode(model, batch, logits, cache, new)[0])[0].tolist()
        return middle - start, (time.perf_counter() - middle) / (new - 1), tokens

    return once if chunk is None else in_chunks


def by_transformers(folder: Path, prompt: list[int], new: int, threads: int) -> Once:
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32).eval()
    tokens = torch.tensor([prompt])
    options = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}

    def generate(count: int) -> tuple[float, list[int]]:
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(tokens, min_new_tokens=count, max_new_tokens=count, **options)
        return time.perf_counter() - start, out[0, len(prompt) :].tolist()

    def once() -> tuple[float, float, list[int]]:
        first, _ = generate(1)
        whole, reply = generate(new)
        return first, (whole - first) / (new - 1), reply

    return once


def main(job: dict) -> None:
    folder, prompt, new = Path(job["folder"]), job["prompt"], job["new"]
    if "python" in job:
        once = by_transformers(folder, prompt, new, job["threads"])
    else:
        once = by_jax(folder, job["pattern"], job["window"], prompt, new, job.get("chunk"))
    once()
    seconds, by_token, reply = once()
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(json.dumps({"prefill": seconds, "decode": by_token, "reply": reply, "gib": most}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
