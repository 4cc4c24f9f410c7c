"""Runs exports in vLLM's own engine, one after another, and writes what it answered and how it held their caches.

The interpreter of `make test-servers` runs this file; it has vLLM and no JAX. `python engine.py JOBS ANSWERS` reads a
JSON list of jobs, each with the fields of `run`, and writes a line for each: what it returned, or {"refused": why}.
"""

import gc
import json
import os
import sys
from collections import defaultdict

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process, where its tables can be read
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}

from vllm import LLM, SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager

HELD = defaultdict(list)  # by request: the most blocks that each group held of it


def _count_blocks() -> None:
    """Counts a request's blocks whenever it was given some."""
    allocate = KVCacheManager.allocate_slots

    def counted(self, request, *args, **kwargs):
        given = allocate(self, request, *args, **kwargs)
        managers = self.coordinator.single_type_managers
        now = [sum(not block.is_null for block in m.req_to_blocks[request.request_id]) for m in managers]
        before = HELD[request.request_id] or [0] * len(now)
        HELD[request.request_id] = [max(pair) for pair in zip(before, now, strict=True)]
        return given

    KVCacheManager.allocate_slots = counted


def run(
    folder: str, prompts: list[list[int]], new_tokens: int, length: int, batched_tokens: int, again: bool = False
) -> dict:
    """What the engine answers to `prompts`.

    Args:
      new_tokens: greedy tokens that are asked for.
      length, batched_tokens: `--max-model-len` and `--max-num-batched-tokens`.
      again: ask every prompt twice, so that the second answer takes blocks of the first from the prefix cache.

    Returns:
      logprobs: of each prompt's tokens but the first; tokens: the new ones; groups: of the layers' caches, each with
      its window (None for full attention) and layers; blocks: the most that a request held in each group;
      block_tokens; reused: tokens that a second answer took from the cache.
    """
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=length,
        max_num_batched_tokens=batched_tokens,
        enable_chunked_prefill=True,
        enable_prefix_caching=again,
        enforce_eager=True,
        disable_log_stats=True,
    )
    params = SamplingParams(temperature=0, max_tokens=new_tokens, detokenize=False, ignore_eos=True)
    told = SamplingParams(temperature=0, max_tokens=new_tokens, detokenize=False, ignore_eos=True, prompt_logprobs=0)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    HELD.clear()
    outputs = llm.generate(asked, told, use_tqdm=False)
    held = list(HELD.values())
    second = llm.generate(asked, params, use_tqdm=False) if again else []
    config = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config
    answer = {
        "logprobs": [
            [
                entry[token].logprob
                for token, entry in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True)
            ]
            for out in outputs
        ],
        "tokens": [list(out.outputs[0].token_ids) for out in outputs],
        "second": [list(out.outputs[0].token_ids) for out in second],
        "reused": [out.num_cached_tokens for out in second],
        "groups": [
            {
                "window": getattr(group.kv_cache_spec, "sliding_window", None),
                "layers": sorted(int(part) for name in group.layer_names for part in name.split(".") if part.isdigit()),
            }
            for group in config.kv_cache_groups
        ],
        "block_tokens": config.kv_cache_groups[0].kv_cache_spec.block_size,
        "blocks": held,
    }
    del llm
    gc.collect()
    return answer


if __name__ == "__main__":
    _count_blocks()
    with open(sys.argv[1]) as file:
        jobs = json.load(file)
    with open(sys.argv[2], "w") as file:
        for job in jobs:
            try:
                answer = run(**job)
            except Exception as error:  # a server's refusal is an answer, whatever its class
                answer = {"refused": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=file, flush=True)
