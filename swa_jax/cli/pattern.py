"""The verbs `swa-jax pattern RECIPE` and `swa-jax pattern diff`: print a pattern, or compare two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer import Argument, Option

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.pattern_files import is_pattern_file, layers_of_file
from swa_jax.cli.groups import expand
from swa_jax.cli.options import BatchedTokens, WindowGiven, check_output, find_model, resolve_patterns
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import HYBRID, WINDOW
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import OWN

Source = "a recipe such as interleave-1-in-4+fa-decode, or a pattern JSON"
Layers = Annotated[int | None, Option("--layers", help="Layers of the model.", min=1)]
OfModel = Annotated[Path | None, Option("--model", help="A model by any of its names, in place of --layers.")]


class PatternVerbs(typer.core.TyperGroup):
    """`swa-jax pattern RECIPE` stays short for `swa-jax pattern print RECIPE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = (*self.commands, "--help")
        return super().parse_args(ctx, args if args and args[0] in known else ["print", *args])


app = typer.Typer(cls=PatternVerbs, no_args_is_help=True, help="Print a pattern (`pattern RECIPE`), or compare two.")


def _size(sources: Sequence[str], layers: int | None, model: Path | None) -> tuple[int | ModelConfig, int | None]:
    """What `sources` are read for, a number of layers or a model, and the model's own window."""
    if model is not None and layers is None:
        from swa_jax.checkpoint.folder import open_checkpoint

        checkpoint = open_checkpoint(find_model(model))
        return checkpoint.config, checkpoint.pattern.sliding_window
    if layers is not None and model is None:
        return layers, None
    if model is None:
        for source in sources:
            if is_pattern_file(source) and (stated := layers_of_file(source)) is not None:
                return stated, None
    raise ConfigError("give one of --layers N and --model DIR: a recipe needs to know how deep the model is")


def print_(
    recipe: Annotated[str, Argument(help=f"{Source[0].upper()}{Source[1:]}.")],
    layers: Layers = None,
    model: OfModel = None,
    *,
    window: WindowGiven,
    length: Annotated[
        int, Option(help="With --model: the tokens of a sequence whose key/value cache is counted.", min=1)
    ] = 32768,
    batched_tokens: BatchedTokens = None,
    out: Annotated[Path | None, Option(help="Write the pattern to this JSON file.")] = None,
) -> None:
    """Print which layer attends how: F full, w window, h head hybrid, S switch.

    With --model also what the key/value cache of a sequence takes, here and in the servers that run the pattern.
    """
    if out is not None:
        check_output("--out", out)
    size, own_window = _size([recipe], layers, model)
    (chosen,) = resolve_patterns([recipe], size, window.value, own_window)
    typer.echo(chosen)
    if model is not None:
        typer.echo("\n".join(_cache_lines(model, chosen, length, batched_tokens)))
    if out is not None:
        chosen.to_json(out)
        typer.echo(f"written to {out}")


app.command("print")(expand(print_))


def _cache_lines(model: Path, pattern: AttentionPattern, length: int, batched_tokens: int | None) -> Iterator[str]:
    """What the cache of a sequence takes here and as each server allocates it, with a warning at a cliff."""
    from swa_jax.checkpoint.folder import open_checkpoint
    from swa_jax.checkpoint.served_cache import BLOCKS, Memory
    from swa_jax.checkpoint.servers import SERVERS

    checkpoint = open_checkpoint(find_model(model))
    yield f"key/value cache of a sequence of {length} tokens in bf16, and its share of full attention's there:"
    for server in (None, *SERVERS):
        given = batched_tokens if server in BLOCKS else None
        memory = Memory(checkpoint.config, checkpoint.hf_config, length, server, given)
        name = "here" if server is None else f"{server} {SERVERS[server].version}"
        try:
            size, share = memory.bytes(pattern), memory.share(pattern)
        except ConfigError as error:
            yield f"  {str(error).split('; ')[0]}"
            continue
        yield f"  {name:22} {size / 2**20:10.1f} MiB  {share:6.1%}"
        if WINDOW in pattern.layer_types and memory.steps:
            yield f"    {memory.steps}"
        if (better := memory.better_full_layers(pattern)) is not None:
            yield (
                f"    It pads groups of layers to one size, which costs much with {len(pattern.full_layers)} full "
                f"layers of {pattern.num_layers}. The nearest number without that is {better} full layers."
            )


@app.command()
def diff(
    first: Annotated[str, Argument(help=f"A pattern: {Source}. In BOSCH's paper the one with fewer windowed heads.")],
    second: Annotated[str, Argument(help="Another one for the same model.")],
    layers: Layers = None,
    model: OfModel = None,
    kv_heads: Annotated[
        int | None, Option(help="KV heads of a layer. Needed where a layer has heads of both kinds.", min=1)
    ] = None,
    swap: Annotated[
        Path | None,
        Option(help="Write the second with the heads that only the first windows, in place of as many at random."),
    ] = None,
    seed: Annotated[int, Option(help="The seed of the heads drawn for --swap.", min=0)] = 0,
) -> None:
    """Compare two patterns: turnover of the windowed heads, Jaccard distances, where they differ, ranks of scores."""
    from swa_jax.select.heads import compare_masks, head_mask, rank_correlation

    if swap is not None:
        check_output("--swap", swap)
    size, own_window = _size([first, second], layers, model)
    patterns = resolve_patterns([first, second], size, OWN, own_window)
    if kv_heads is None and isinstance(size, ModelConfig):
        kv_heads = size.common_kv_heads
    kv_heads = _check_heads(patterns, kv_heads)
    masks = [head_mask(pattern, kv_heads) for pattern in patterns]
    difference = compare_masks(masks[0], masks[1])
    unit = "heads" if kv_heads > 1 else "layers"
    for name, mask in zip((first, second), masks, strict=True):
        counted = f"KV {unit}" if kv_heads > 1 else unit
        typer.echo(f"{name}: {(~mask).sum()} of {mask.size} {counted} windowed ({(~mask).mean():.1%})")
    typer.echo(
        f"turnover {difference.turnover:.1%} of the first's windowed {unit} are not the second's "
        f"({difference.relative_turnover:.1%} of what the two counts allow)\n"
        f"Jaccard distance {difference.jaccard_distance:.3f}; of the full {unit} "
        f"{compare_masks(~masks[0], ~masks[1]).jaccard_distance:.3f}"
    )
    scores = [np.array(pattern.provenance.get("scores", {}), object) for pattern in patterns]
    if scores[0].shape == scores[1].shape != ():
        correlation = rank_correlation(*(array.astype(float) for array in scores))
        typer.echo(f"rank correlation of the scores {correlation:.2f} (Spearman)")
    for line in _differences(masks[0], masks[1]):
        typer.echo(line)
    if swap is not None:
        swapped = _swapped(patterns[1], masks, {"first": first, "second": second, "seed": seed})
        swapped.to_json(swap)
        typer.echo(f"{swapped}\nwritten to {swap}")


def _check_heads(patterns: Sequence[AttentionPattern], kv_heads: int | None) -> int:
    """KV heads of a layer; 1 where only whole layers are compared, of which any number gives the same shares."""
    if kv_heads is None:
        if any(HYBRID in pattern.layer_types for pattern in patterns):
            raise ConfigError("--kv-heads is missing: a layer with heads of both kinds does not say how many it has")
        kv_heads = 1
    highest = max((head for p in patterns for heads in p.full_kv_heads for head in heads), default=0)
    if highest >= kv_heads:
        raise ConfigError(f"--kv-heads is {kv_heads}, but a pattern names KV head {highest}")
    return kv_heads


def _differences(first: np.ndarray, second: np.ndarray) -> Iterator[str]:
    """A line for every layer of two masks [L, K] of full heads, and for each that windows what the other does not."""
    for layer in range(len(first)):
        for who, heads in (
            ("only the first", ~first[layer] & second[layer]),
            ("only the second", first[layer] & ~second[layer]),
        ):
            if heads.any():
                which = "it" if heads.size == 1 else f"KV heads {heads.nonzero()[0].tolist()}"
                yield f"layer {layer}: {who} windows {which}"


def _swapped(pattern: AttentionPattern, masks: Sequence[np.ndarray], provenance: dict[str, Any]) -> AttentionPattern:
    from swa_jax.select.heads import head_pattern, swap_back

    if pattern.sliding_window is None:
        raise ConfigError(f"{provenance['second']} windows nothing: there is nothing to swap")
    full = swap_back(masks[0], masks[1], provenance["seed"])
    return head_pattern(full, pattern.window, {"method": "swap"} | provenance)
