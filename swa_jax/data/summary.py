"""What training would read: sources, tokens, shares, padding, and the first rows as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from pallas_kernels.math.spec import NEVER
from swa_jax.data.batches import make_batches, open_source
from swa_jax.data.packing import PackedPrompts, PackedText
from swa_jax.data.sources import SourceConfig
from swa_jax.data.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class SourceSummary:
    """One source as training reads it; None where samples are made up and have no end."""

    name: str
    share: float  # of the samples
    documents: int | None
    tokens: int | None  # an epoch
    held_out_tokens: int
    padding: float  # share of the row's places
    left_out: int  # prompts longer than a row


def summarize(sources: Sequence[SourceConfig], tokenizer: Tokenizer, *, length: int, seed: int) -> list[SourceSummary]:
    """A summary of each source."""
    total = sum(source.weight for source in sources)
    found = []
    for source in sources:
        samples = open_source(source, tokenizer, length=length, seed=seed)
        documents = tokens = None
        held_out = left_out = 0
        padding = 0.0
        if isinstance(samples, PackedText | PackedPrompts):
            documents, tokens = len(samples.sizes), int(samples.sizes.sum())
        if isinstance(samples, PackedPrompts):
            padding, left_out = 1 - int(samples.sizes.sum()) / (samples.rows * length), samples.too_long
        if source.held_out:
            kept = open_source(source, tokenizer, length=length, seed=None, held_out=True)
            held_out = int(kept.sizes.sum())
        name = source.kind if source.kind == "dictionary" else f"{source.kind}: {', '.join(source.files)}"
        found.append(SourceSummary(name, source.weight / total, documents, tokens, held_out, padding, left_out))
    return found


def first_rows(
    sources: Sequence[SourceConfig], tokenizer: Tokenizer, *, length: int, seed: int, rows: int
) -> Iterator[str]:
    """The first rows of training as text, a line each segment; what is learned of a prompt comes after `>>>`."""
    batches = make_batches(sources, tokenizer, length=length, batch_size=rows, seed=seed)
    batch = next(batches)
    batches.close()
    for row in range(rows):
        segments = batch["segment_ids"][row]
        follows = (segments[1:] == segments[:-1]) & (segments[1:] != 0)  # as of `next_token_targets`
        filled, learned = np.count_nonzero(segments), np.count_nonzero(batch["weights"][row, 1:] * follows)
        yield f"row {row}: {filled} of {length} tokens, {learned} learned"
        for segment in range(1, int(batch["segment_ids"][row].max()) + 1):
            tokens = batch["tokens"][row][batch["segment_ids"][row] == segment]
            boundary = batch["full_from"][row, segment - 1] if "full_from" in batch else NEVER
            parts = [tokens] if boundary == NEVER else [tokens[:boundary], tokens[boundary:]]
            yield f"  {segment}: " + " >>> ".join(_brief(tokenizer.decode(part)) for part in parts)


def _brief(text: str) -> str:
    """One line, its middle left out where it is long."""
    line = text.replace("\n", "\\n")
    return line if len(line) <= 160 else f"{line[:80]} ... {line[-80:]}"
