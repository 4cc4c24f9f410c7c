"""Windows with sink tokens, in PyTorch. Reads the blocks of the sinks and of the windows, and no others."""

from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from swa_jax_vllm.pattern import Rule

INTEGERS = {2: torch.int16, 4: torch.int32}  # by their bytes


class Rows(NamedTuple):
    """Requests of a batch with equally many queries: the same for all layers of a group."""

    tokens: torch.Tensor  # where their queries lie in the batch, int [r, T]
    blocks: torch.Tensor  # of the cache: those of the sinks, and behind them those from the first window on, int [r, m]
    visible: torch.Tensor  # which of their keys each query sees, bool [r, T, S]


def write(kv_cache: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
    """Keys and values [N, K, D] into their slots (int [N]) of a cache [blocks, K, size, 2 D]."""
    size = kv_cache.shape[2]
    kv_cache[slots // size, :, slots % size] = torch.cat([key, value], -1)[: len(slots)]


def rows_of(batch: Any, prompt_lengths: torch.Tensor | None, rule: Rule, size: int) -> list[Rows]:
    """What the queries of a batch read.

    Requests with one query each, which are most when many are answered, are taken together; chunks of prompts, which
    are few and long, are taken one by one.

    Args:
      batch: `query_start_loc` int [R + 1], `seq_lens` int [R] and `block_table` int [R, M], as vLLM's backends have it.
      prompt_lengths: int [R]; queries from there on see everything. None: all see windows and sinks.
      size: tokens of a block.
    """
    where, ends = batch.query_start_loc, batch.seq_lens
    lengths = where[1:] - where[:-1]
    answers = torch.full_like(ends, torch.iinfo(ends.dtype).max) if prompt_lengths is None else prompt_lengths
    full = ends > answers  # some query sees everything
    single = lengths == 1
    alike = [rows for rows in ((single & ~full).nonzero()[:, 0], (single & full).nonzero()[:, 0]) if len(rows)]
    found = []
    for rows in [*alike, *(lengths > 1).nonzero()]:
        steps = torch.arange(int(lengths[rows[0]]))
        at = (ends[rows] - len(steps))[:, None] + steps  # [r, T]
        blocks, visible = _seen(at, ends[rows], answers[rows], rule, size)
        pages = batch.block_table[rows].gather(1, blocks.clamp(max=batch.block_table.shape[1] - 1)).long()
        found.append(Rows(where[rows][:, None] + steps, pages, visible))
    return found


def _seen(at, ends, answers, rule, size) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks [r, m] that queries at the positions `at` [r, T] read, by their places in the sequence, and what each
    query sees of their keys [r, T, S]."""
    first = (at[:, 0] - rule.window + 1).clamp(min=0) // size
    first = torch.where(ends > answers, 0, first)  # [r]
    sink_blocks = -(-rule.num_sink_tokens // size)
    last = (ends - 1) // size
    behind = first[:, None] + torch.arange(int((last - first).max()) + 1)  # [r, n]
    blocks = torch.cat([torch.arange(sink_blocks).expand(len(ends), -1), behind], 1)  # [r, m]
    once = torch.ones_like(blocks, dtype=torch.bool)
    once[:, sink_blocks:] = behind >= sink_blocks  # a block of sinks that a window reaches is there twice
    keys, now = (blocks[:, :, None] * size + torch.arange(size)).flatten(1)[:, None], at[:, :, None]
    visible = (keys > now - rule.window) | (keys < rule.num_sink_tokens) | (now >= answers[:, None, None])
    return blocks, visible & (keys <= now) & once.repeat_interleave(size, 1)[:, None]


def attend(query: torch.Tensor, kv_cache: torch.Tensor, batch: list[Rows], scale: float, output: torch.Tensor) -> None:
    """Attention of queries [N, H, D] with a cache [blocks, K, size, 2 D], into `output` [N, H, D]."""
    for tokens, blocks, visible in batch:
        pairs = kv_cache[blocks].transpose(1, 2).flatten(2, 3)  # [r, K, S, 2 D]
        # What was never written may be no number. All bits or none: a twentieth of the time of `masked_fill`.
        bits = INTEGERS[pairs.element_size()]
        pairs.view(bits).bitwise_and_(visible.any(1).to(bits).neg()[:, None, :, None])
        key, value = pairs.chunk(2, -1)
        some, masks = query[tokens], visible[:, None]
        if tokens.shape[1] == 1:  # the group of a KV head in place of the text: seven times as fast in bfloat16
            some = some[:, 0].unflatten(1, (kv_cache.shape[1], -1))  # [r, K, G, D]
            seen = scaled_dot_product_attention(some, key, value, masks, scale=scale).flatten(1, 2)[:, None]
        else:
            some = some.transpose(1, 2)  # [r, H, T, D]
            seen = scaled_dot_product_attention(some, key, value, masks, scale=scale, enable_gqa=True).transpose(1, 2)
        output[tokens] = seen.to(output.dtype)
