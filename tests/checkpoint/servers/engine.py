"""Runs exports in vLLM's own engine, and says what it answered and how it held their caches.

The interpreter of `make test-servers` runs this file; it has vLLM and no JAX. Each line that it reads is a JSON object
with the arguments of `run`; each line that it writes is what `run` returned, or {"refused": why}.
"""

import copy
import gc
from collections import defaultdict

from line_answers import answer_lines
from vllm import LLM, SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler

HELD = defaultdict(list)  # by request: the most blocks that each group held of it
FIRST = {}  # by request: the number of the first block in each group when it was last given some; None: no longer held
PUT_ASIDE = []  # requests whose blocks were taken away, to be computed again


def _count_blocks() -> None:
    """Counts a request's blocks whenever it was given some."""
    allocate = KVCacheManager.allocate_slots

    def counted(self, request, *args, **kwargs):
        given = allocate(self, request, *args, **kwargs)
        managers = self.coordinator.single_type_managers
        first = [m.req_to_blocks[request.request_id][:1] for m in managers]
        FIRST[request.request_id] = [
            next((block.block_id for block in blocks if not block.is_null), None) for blocks in first
        ]
        now = [sum(not block.is_null for block in m.req_to_blocks[request.request_id]) for m in managers]
        before = HELD[request.request_id] or [0] * len(now)
        HELD[request.request_id] = [max(pair) for pair in zip(before, now, strict=True)]
        return given

    KVCacheManager.allocate_slots = counted


def _note_put_aside() -> None:
    preempt = Scheduler._preempt_request

    def noted(self, request, *args, **kwargs):
        PUT_ASIDE.append(request.request_id)
        return preempt(self, request, *args, **kwargs)

    Scheduler._preempt_request = noted


def _granted(spec, config, asynchronous: bool) -> int:
    """Blocks that vLLM's planner reserves for a request in a group of layers, with async scheduling or without."""
    config, scheduler = copy.copy(config), copy.copy(config.scheduler_config)
    object.__setattr__(scheduler, "async_scheduling", asynchronous)
    object.__setattr__(config, "scheduler_config", scheduler)
    return spec.max_memory_usage_bytes(config) // spec.page_size_bytes


def run(
    folder: str,
    prompts: list[list[int]],
    new_tokens: int,
    length: int,
    batched_tokens: int,
    turn: list[int] | None = None,
    blocks: int = 256,
    forget: bool = False,
    dtype: str = "float32",
    ranks: int = 1,
) -> dict:
    """What the engine answers to `prompts`; then to the same prompts once more, and to what a user says to its answers,
    both from its cache of prefixes.

    Args:
      new_tokens: greedy tokens that are asked for.
      length, batched_tokens: `--max-model-len` and `--max-num-batched-tokens`.
      turn: what a user says to each answer; without it there is no next turn.
      blocks: of the whole cache.
      ranks: `--tensor-parallel-size`.
      forget: take the first block of every request out of the cache of prefixes before they are asked once more.

    Returns:
      logprobs: of each prompt's tokens but the first; tokens, second, next_turn: the new ones, each time;
      next_logprobs: of the next turn's; reused, next_reused: tokens that a second answer and the next turn's took from
      the cache; groups: of the layers' caches, each with its window (None: full attention), its layers, and the blocks
      `granted` to a request without and with async scheduling; held: the most blocks that a request held in each group;
      first: whether it still held its first one there at the end; block_tokens; put_aside: how many requests of the
      first answers lost their blocks, and were computed again.
    """
    llm = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=dtype,
        tensor_parallel_size=ranks,
        max_model_len=length,
        max_num_batched_tokens=batched_tokens,
        enable_chunked_prefill=True,
        enable_prefix_caching=True,
        enforce_eager=True,
        disable_log_stats=True,
        num_gpu_blocks_override=blocks,
    )
    wanted = {"temperature": 0, "max_tokens": new_tokens, "detokenize": False, "ignore_eos": True}
    asked = [{"prompt_token_ids": prompt} for prompt in prompts]
    HELD.clear()
    FIRST.clear()
    PUT_ASIDE.clear()
    outputs = llm.generate(asked, SamplingParams(**wanted, prompt_logprobs=0), use_tqdm=False)
    core = llm.llm_engine.engine_core.engine_core
    held, first, put_aside = list(HELD.values()), list(FIRST.values()), len(PUT_ASIDE)
    if forget:
        known = {number for numbers in first for number in numbers if number is not None}
        core.scheduler.kv_cache_manager.block_pool.evict_blocks(known)
    second = llm.generate(asked, SamplingParams(**wanted), use_tqdm=False)
    said = [[*out.prompt_token_ids, *out.outputs[0].token_ids, *turn] for out in outputs] if turn else []
    said = [{"prompt_token_ids": prompt} for prompt in said]
    next_turn = llm.generate(said, SamplingParams(**wanted, logprobs=0), use_tqdm=False) if said else []
    groups = core.scheduler.kv_cache_config.kv_cache_groups
    answer = {
        "logprobs": [
            [told[token].logprob for token, told in zip(out.prompt_token_ids[1:], out.prompt_logprobs[1:], strict=True)]
            for out in outputs
        ],
        "tokens": [list(out.outputs[0].token_ids) for out in outputs],
        "second": [list(out.outputs[0].token_ids) for out in second],
        "next_turn": [list(out.outputs[0].token_ids) for out in next_turn],
        "next_logprobs": [
            [told[token].logprob for token, told in zip(out.outputs[0].token_ids, out.outputs[0].logprobs, strict=True)]
            for out in next_turn
        ],
        "reused": [out.num_cached_tokens for out in second],
        "next_reused": [out.num_cached_tokens for out in next_turn],
        "groups": [
            {
                "window": getattr(group.kv_cache_spec, "sliding_window", None),
                "layers": sorted(int(part) for name in group.layer_names for part in name.split(".") if part.isdigit()),
                "granted": [_granted(group.kv_cache_spec, core.vllm_config, on) for on in (False, True)],
            }
            for group in groups
        ],
        "block_tokens": groups[0].kv_cache_spec.block_size,
        "held": held,
        "first": [[number is not None for number in numbers] for numbers in first],
        "put_aside": put_aside,
    }
    del llm, core
    gc.collect()
    return answer


if __name__ == "__main__":
    _count_blocks()
    _note_put_aside()
    # vLLM collects garbage eight times an engine: with all that is imported, four times as long as all the rest.
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    answer_lines(run)
