"""`swa-jax pattern diff`: how the windowed heads of two patterns differ, and BOSCH's swap test between them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer import Argument, Option

from swa_jax.errors import ConfigError
from swa_jax.model.layer_types import HYBRID
from swa_jax.model.pattern import AttentionPattern


class PatternVerbs(typer.core.TyperGroup):
    """`swa-jax pattern RECIPE` stays short for `swa-jax pattern print RECIPE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = (*self.commands, "--help")
        return super().parse_args(ctx, args if args and args[0] in known else ["print", *args])


def diff(
    first: Annotated[Path, Argument(help="A pattern JSON; in the paper the one with fewer windowed heads.")],
    second: Annotated[Path, Argument(help="Another of the same model.")],
    kv_heads: Annotated[
        int | None, Option(help="KV heads of a layer; needed where a layer has heads of both kinds.", min=1)
    ] = None,
    swap: Annotated[
        Path | None,
        Option(
            help="Write the second with the heads that only the first windows, in place of as many at random."
        ),
    ] = None,
    seed: Annotated[int, Option(help="Of those drawn for --swap.", min=0)] = 0,
) -> None:
    """Compare two patterns: turnover of the windowed heads, Jaccard distances, where they differ, ranks of scores."""
    from swa_jax.select.heads import compare_masks, head_mask, head_pattern, rank_correlation, swap_back

    patterns = [AttentionPattern.from_json(file) for file in (first, second)]
    if kv_heads is None:
        if any(HYBRID in pattern.layer_types for pattern in patterns):
            raise ConfigError(
                "--kv-heads is missing: a layer with heads of both kinds does not say how many it has"
            )
        kv_heads = 1  # whole layers only: any number gives the same shares
    highest = max((head for p in patterns for heads in p.full_kv_heads for head in heads), default=0)
    if highest >= kv_heads:
        raise ConfigError(f"--kv-heads is {kv_heads}, but a pattern names KV head {highest}")
    masks = [head_mask(pattern, kv_heads) for pattern in patterns]
    difference = compare_masks(masks[0], masks[1])
    parts = "KV heads" if kv_heads > 1 else "layers"
    for file, mask in zip((first, second), masks, strict=True):
        typer.echo(f"{file}: {(~mask).sum()} of {mask.size} {parts} windowed ({(~mask).mean():.1%})")
    typer.echo(
        f"turnover {difference.turnover:.1%} of the first's windowed {parts.split()[-1]} are not the second's "
        f"({difference.relative_turnover:.1%} of what the two counts allow)\n"
        f"Jaccard distance {difference.jaccard_distance:.3f}; of the full {parts.split()[-1]} "
        f"{compare_masks(~masks[0], ~masks[1]).jaccard_distance:.3f}"
    )
    scores = [np.array(pattern.provenance.get("scores", {}), object) for pattern in patterns]
    if scores[0].shape == scores[1].shape != ():
        correlation = rank_correlation(*(array.astype(float) for array in scores))
        typer.echo(f"rank correlation of the scores {correlation:.2f} (Spearman)")
    for layer in range(len(masks[0])):
        for what, heads in (
            ("only the first", ~masks[0][layer] & masks[1][layer]),
            ("only the second", masks[0][layer] & ~masks[1][layer]),
        ):
            if heads.any():
                which = "it" if kv_heads == 1 else f"KV heads {heads.nonzero()[0].tolist()}"
                typer.echo(f"layer {layer}: {what} windows {which}")
    if swap is not None:
        if patterns[1].sliding_window is None:
            raise ConfigError(f"{second} windows nothing: there is nothing to swap")
        full = swap_back(masks[0], masks[1], seed)
        provenance = {"method": "swap", "first": str(first), "second": str(second), "seed": seed}
        swapped = dataclasses.replace(
            head_pattern(full, patterns[1].sliding_window, patterns[1].num_sink_tokens, provenance),
            full_attention_decode=patterns[1].full_attention_decode,
        )
        swapped.to_json(swap)
        typer.echo(f"{swapped}\nwritten to {swap}")
