"""Windows with sink tokens, in PyTorch. Reads the blocks of the sinks and of the windows, and no others."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from swa_jax_vllm.pattern import Rule


def write(kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Keys and values [N, K, D] into their slots (int [N]) of a cache [blocks, K, size, 2 D]."""
    size = kv_cache.shape[2]
    kv_cache[slots // size, :, slots % size] = torch.cat([key, value], -1)[: len(slots)]


def attend(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: Any,
    prompt_lengths: torch.Tensor | None,
    rule: Rule,
    scale: float,
    output: torch.Tensor,
) -> None:
    """Attention of a batch, into `output`.

    Requests with one query each, which are most when many are answered, are computed at once; chunks of prompts, which
    are few and long, one by one.

    Args:
      query, output: [N, H, D].
      kv_cache: [blocks, K, size, 2 D].
      batch: `query_start_loc` int [R + 1], `seq_lens` int [R] and `block_table` int [R, M], as vLLM's backends have it.
      prompt_lengths: int [R]; queries from there on see everything. None: all see windows and sinks.
    """
    where, ends = batch.query_start_loc, batch.seq_lens
    lengths = where[1:] - where[:-1]
    answers = torch.full_like(ends, torch.iinfo(ends.dtype).max) if prompt_lengths is None else prompt_lengths
    full = ends > answers  # some query sees everything
    single = lengths == 1
    alike = [rows for rows in ((single & ~full).nonzero()[:, 0], (single & full).nonzero()[:, 0]) if len(rows)]
    for rows in [*alike, *(lengths > 1).nonzero()]:
        tokens = where[rows][:, None] + torch.arange(int(lengths[rows[0]]))  # [r, T]
        seen = _attend_rows(query[tokens], kv_cache, batch.block_table[rows], ends[rows], answers[rows], rule, scale)
        output[tokens] = seen.to(output.dtype)


def _attend_rows(query, kv_cache, block_table, ends, answers, rule, scale) -> torch.Tensor:
    """Of requests with equally many queries [r, T, H, D]: as the queries.

    The keys are those of the sinks' blocks, and behind them those of the blocks from the first window on.
    """
    size, queries = kv_cache.shape[2], query.shape[1]
    at = (ends - queries)[:, None] + torch.arange(queries)  # [r, T]
    first = (at[:, 0] - rule.window + 1).clamp(min=0) // size
    first = torch.where(ends > answers, 0, first)  # [r]
    sink_blocks = -(-rule.num_sink_tokens // size)
    last = (ends - 1) // size
    behind = first[:, None] + torch.arange(int((last - first).max()) + 1)  # [r, n]
    blocks = torch.cat([torch.arange(sink_blocks).expand(len(ends), -1), behind], 1)  # [r, m]
    once = torch.ones_like(blocks, dtype=torch.bool)
    once[:, sink_blocks:] = behind >= sink_blocks  # a block of sinks that a window reaches is there twice
    keys_at = (blocks[:, :, None] * size + torch.arange(size)).flatten(1)  # [r, S]
    once = once.repeat_interleave(size, 1)  # [r, S]

    keys, now = keys_at[:, None], at[:, :, None]
    visible = (keys > now - rule.window) | (keys < rule.num_sink_tokens) | (now >= answers[:, None, None])
    visible &= (keys <= now) & once[:, None]  # [r, T, S]
    pages = kv_cache[block_table.gather(1, blocks.clamp(max=block_table.shape[1] - 1)).long()]  # [r, m, K, size, 2 D]
    pairs = pages.transpose(1, 2).flatten(2, 3)  # [r, K, S, 2 D]
    pairs = pairs.masked_fill(~visible.any(1)[:, None, :, None], 0)  # what was never written may be no number
    key, value = pairs.chunk(2, -1)
    seen = scaled_dot_product_attention(
        query.transpose(1, 2), key, value, visible[:, None], scale=scale, enable_gqa=True
    )  # [r, H, T, D]
    return seen.transpose(1, 2)
