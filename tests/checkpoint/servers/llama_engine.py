"""Runs GGUF files in llama.cpp's own server, and says what it answered and which cells it keeps, or where it listens.

The interpreter of `make test-servers` runs this file as it does `engine.py`, whose lines it reads and writes. Keys and
values are f32, and attention is not the fused one, which on a CPU rounds to f16.
"""

import re

import xllamacpp
from line_answers import answer_lines

LIVE = []  # servers that others ask


def run(
    folder: str,
    prompts: list[list[int]],
    new_tokens: int,
    length: int,
    batched_tokens: int,
    turn: list[int],
    words: int = 0,
) -> dict:
    """What the server answers to `prompts`. Without any it stays, and the answer is its `url`.

    Args:
      length, batched_tokens: `--ctx-size` and `--ubatch-size`.
      turn: not used.
      words: of the vocabulary, whose log-probabilities are all asked for.

    Returns:
      tokens: the greedy ones of each prompt; logprobs: [new tokens, words] before each of them; cells: of each cache,
      [cells, layers].
    """
    with open("/proc/self/fd/2", errors="replace") as log:
        log.seek(0, 2)
        params = xllamacpp.CommonParams()
        params.model.path = f"{folder}/model.gguf"
        params.n_ctx, params.n_ubatch, params.n_parallel, params.fit_params = length, batched_tokens, 1, False
        params.warmup, params.verbosity = False, 5
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        server = xllamacpp.Server(params)
        if not prompts:
            LIVE.append(server)
            return {"url": server.listening_address}
        wanted = {"max_tokens": new_tokens, "temperature": 0, "logprobs": words}
        answers = [server.handle_completions({"prompt": prompt, **wanted}) for prompt in prompts]
        cells = re.findall(r"\( *(\d+) cells, +(\d+) layers", log.read())
    found = [answer["choices"][0]["logprobs"]["content"] for answer in answers]
    ordered = [[sorted(one["top_logprobs"], key=lambda top: top["id"]) for one in content] for content in found]
    return {
        "tokens": [[one["id"] for one in content] for content in found],
        "logprobs": [[[top["logprob"] for top in row] for row in rows] for rows in ordered],
        "cells": [[int(count), int(layers)] for count, layers in cells],
    }


if __name__ == "__main__":
    answer_lines(run)
