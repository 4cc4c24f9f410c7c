"""The queries of prompts and those of answers, each as a batch of their own."""

from typing import NamedTuple

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata


class Span(NamedTuple):
    """Neighbouring queries of some requests."""

    rows: torch.Tensor  # which requests, int [R]
    starts: torch.Tensor  # position of the first query of each, int [R]
    ends: torch.Tensor  # position behind the last, int [R]


def _bounds(common: CommonAttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions of the first query of each request, and behind the last: int [R], int [R]."""
    where = common.query_start_loc[: common.num_reqs + 1]
    ends = common.seq_lens[: common.num_reqs]
    return ends - (where[1:] - where[:-1]), ends


def _span(starts: torch.Tensor, ends: torch.Tensor) -> Span:
    rows = (ends > starts).nonzero()[:, 0]
    return Span(rows, starts[rows], ends[rows])


def prompts_of(common: CommonAttentionMetadata, prompt_lengths: torch.Tensor) -> Span:
    """The queries that belong to prompts. A request that was put aside computes its answer again, too."""
    starts, ends = _bounds(common)
    return _span(starts, torch.minimum(ends, prompt_lengths))


def answers_of(common: CommonAttentionMetadata, prompt_lengths: torch.Tensor) -> Span:
    """The queries that belong to answers."""
    starts, ends = _bounds(common)
    return _span(torch.maximum(starts, prompt_lengths), ends)


def queries_of(common: CommonAttentionMetadata, span: Span) -> tuple[torch.Tensor, CommonAttentionMetadata]:
    """Where the queries of a span lie in a batch, int [N], and the batch of these alone."""
    rows, starts, ends = span
    lengths = ends - starts
    offsets = torch.zeros(len(rows) + 1, dtype=torch.int32, device=lengths.device)  # [R + 1]
    offsets[1:] = lengths.cumsum(0)
    first = common.query_start_loc[rows] + starts - _bounds(common)[0][rows]  # [R]
    number = torch.arange(int(offsets[-1]), device=lengths.device)
    tokens = number + (first - offsets[:-1]).repeat_interleave(lengths)  # [N]
    alone = common.replace(
        query_start_loc=offsets,
        query_start_loc_cpu=offsets.cpu(),
        seq_lens=ends,
        num_reqs=len(rows),
        num_actual_tokens=len(tokens),
        max_query_len=int(lengths.max()),
        max_seq_len=int(ends.max()),
        block_table_tensor=common.block_table_tensor[rows],
        slot_mapping=common.slot_mapping[tokens],
        seq_lens_cpu_upper_bound=ends.cpu(),
        positions=None,
        is_prefilling=None,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )
    return tokens, alone
