"""What exports hold in vLLM's cache, and how fast they answer: `python measure.py FULL OTHER ...`, one line each.

Every folder is served in this process, without a cache of prefixes. Requests of random tokens come all at once.
"""

import argparse
import os
import random
import time

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine's tables can then be read

from vllm import LLM, SamplingParams


def answer(llm: LLM, prompts: list[list[int]], new_tokens: int) -> tuple[int, float, float]:
    """The most blocks held at once, and the seconds until all prompts were read, and from there on."""
    engine = llm.llm_engine
    pool = engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    wanted = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    free, held, read = pool.get_num_free_blocks(), 0, 0.0
    begin, answering = time.perf_counter(), set()
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, wanted)
    while engine.has_unfinished_requests():
        answering |= {output.request_id for output in engine.step()}
        held = max(held, free - pool.get_num_free_blocks())
        read = read or len(answering) // len(prompts) * (time.perf_counter() - begin)
    return held, read, time.perf_counter() - begin - read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", help="exports; the first is what the others are compared with")
    sizes = {"prompt-tokens": 1536, "requests": 4, "new-tokens": 64, "batched-tokens": 256, "runs": 3}
    for name, value in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"default: {value}")
    parser.add_argument(
        "--enforce-eager", action="store_true", help="as of `vllm serve`: a quick start, slower answers"
    )
    given = parser.parse_args()
    draw = random.Random(0)
    prompts = [[draw.randrange(10, 100) for _ in range(given.prompt_tokens)] for _ in range(given.requests)]
    full = None
    for folder in given.folders:
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            max_model_len=given.prompt_tokens + given.new_tokens,
            max_num_batched_tokens=given.batched_tokens,
            enable_prefix_caching=False,
            enforce_eager=given.enforce_eager,
            disable_log_stats=True,
        )
        groups = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_groups
        block = max(len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in groups)
        tried = [answer(llm, prompts, given.new_tokens) for _ in range(given.runs)]
        held, read, rest = map(min, zip(*tried, strict=True))
        full = full or held * block
        print(
            f"{folder}: {held} blocks, {held * block / 2**20:.1f} MiB ({held * block / full:.1%}); prompts "
            f"{len(prompts) * given.prompt_tokens / read:.0f} tokens/s, answers "
            f"{len(prompts) * (given.new_tokens - 1) / rest:.1f} tokens/s",
            flush=True,
        )
        del llm


if __name__ == "__main__":
    main()
