"""The verbs `swa-jax pattern RECIPE` and `swa-jax pattern diff`: print a pattern, or compare two."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from typer import Argument

from swa_jax.base.errors import ConfigError
from swa_jax.checkpoint.families.pattern_files import is_pattern_file, layers_of_file
from swa_jax.cli.groups import expand
from swa_jax.cli.options import (
    MOST_LAYERS,
    BatchedTokens,
    Device,
    Json,
    WindowGiven,
    check_output,
    find_model,
    in_output,
    in_pattern,
    in_serving,
    print_report,
    resolve_patterns,
)
from swa_jax.model.config import ModelConfig
from swa_jax.model.layer_types import HYBRID
from swa_jax.model.pattern import AttentionPattern
from swa_jax.model.window import OWN

Source = "a recipe such as interleave-1-in-4+fa-decode, or a pattern JSON"
Layers = Annotated[int | None, in_pattern(help="Layers of the model.", min=1, max=MOST_LAYERS)]
OfModel = Annotated[Path | None, in_pattern(help="A model by any of its names, in place of --layers.")]


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
        int, in_serving(help="With --model: tokens of the sequence whose key/value cache is counted.", min=1, max=10**9)
    ] = 32768,
    batched_tokens: BatchedTokens = None,
    device: Device = None,
    out: Annotated[Path | None, in_output(help="Write the pattern to this JSON file.")] = None,
    as_json: Json = False,
) -> None:
    """Print which layer attends how: F full, w window, h head hybrid, S switch.

    With --model also what the key/value cache of a sequence takes, here and in the servers that run the pattern.
    """
    check_output("--out", out)
    size, own_window = _size([recipe], layers, model)
    (chosen,) = resolve_patterns([recipe], size, window.as_window, own_window)
    report: dict[str, Any] = {"pattern": json.loads(chosen.to_json())}
    lines = [str(chosen)]
    if model is not None:
        report |= {"length": length, "caches": list(_caches(model, chosen, length, batched_tokens, device))}
        lines += [f"key/value cache of a sequence of {length} tokens in bf16, and its share of full attention's there:"]
        lines += [line for cache in report["caches"] for line in _cache_lines(cache, chosen)]
    print_report(report, "\n".join(lines), as_json)
    if out is not None:
        chosen.to_json(out)
        typer.echo(f"written to {out}", err=as_json)


app.command("print")(expand(print_))


def _caches(
    model: Path, pattern: AttentionPattern, length: int, batched_tokens: int | None, device: str | None
) -> Iterator[dict[str, Any]]:
    """What the cache of a sequence takes here and as each server allocates it, or why a server cannot run the pattern.

    At a cliff `better_full_layers` is the nearest number of full layers that the server groups without much waste.
    """
    from swa_jax.checkpoint.folder import open_checkpoint
    from swa_jax.checkpoint.served_cache import Memory
    from swa_jax.checkpoint.servers import SERVERS

    checkpoint = open_checkpoint(find_model(model))
    devices = {name for server in SERVERS.values() for name in server.cache.devices}
    if device is not None and device not in devices:
        raise ConfigError(f"--device is '{device}'; known: {', '.join(sorted(devices))}")
    for server in (None, *SERVERS):
        known = {} if server is None else SERVERS[server].cache.devices
        given = (batched_tokens if known else None, device if device in known else None)
        memory = Memory(checkpoint.config, checkpoint.hf_config, length, server, *given)
        where = {"server": server, "version": None if server is None else SERVERS[server].version}
        try:
            found = {"bytes": memory.bytes(pattern), "share": memory.share(pattern)}
        except ConfigError as error:
            yield where | {"refused": str(error).split("; ")[0]}
            continue
        steps = memory.steps if not pattern.is_full and memory.frees(pattern) else ""
        better = memory.better_full_layers(pattern)
        yield (
            where
            | found
            | {
                "device": memory.device,
                "batched_tokens": memory.batched_tokens,
                "steps": steps,
                "better_full_layers": better,
            }
        )


def _cache_lines(cache: dict[str, Any], pattern: AttentionPattern) -> Iterator[str]:
    """One of the caches in words, with a warning at a cliff."""
    if "refused" in cache:
        yield f"  {cache['refused']}"
        return
    name = "here" if cache["server"] is None else f"{cache['server']} {cache['version']}"
    yield f"  {name:22} {cache['bytes'] / 2**20:10.1f} MiB  {cache['share']:6.1%}"
    if cache["steps"]:
        yield f"    {cache['steps']}"
    if cache["better_full_layers"] is not None:
        yield (
            f"    It pads groups of layers to one size, which costs much with {len(pattern.full_layers)} full "
            f"layers of {pattern.num_layers}. The nearest number without that is {cache['better_full_layers']} full "
            "layers."
        )


@app.command()
def diff(
    first: Annotated[str, Argument(help=f"A pattern: {Source}. In BOSCH's paper the one with fewer windowed heads.")],
    second: Annotated[str, Argument(help="Another one for the same model.")],
    layers: Layers = None,
    model: OfModel = None,
    kv_heads: Annotated[
        int | None, in_pattern(help="KV heads of a layer. Needed where a layer has heads of both kinds.", min=1)
    ] = None,
    swap: Annotated[
        Path | None,
        in_output(help="Write the second here, with the heads that only the first windows in place of as many drawn."),
    ] = None,
    seed: Annotated[int, in_output(help="Seed of the heads drawn for --swap.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Compare two patterns: turnover of the windowed heads, Jaccard distances, where they differ, ranks of scores."""
    from swa_jax.select.heads import compare_masks, head_mask, rank_correlation

    check_output("--swap", swap)
    size, own_window = _size([first, second], layers, model)
    patterns = resolve_patterns([first, second], size, OWN, own_window)
    if kv_heads is None and isinstance(size, ModelConfig):
        kv_heads = size.common_kv_heads
    kv_heads = _check_heads(patterns, kv_heads)
    masks = [head_mask(pattern, kv_heads) for pattern in patterns]
    difference = compare_masks(masks[0], masks[1])
    report: dict[str, Any] = {
        "patterns": [first, second],
        "kv_heads": kv_heads,
        "windowed": [int((~mask).sum()) for mask in masks],
        "of": masks[0].size,
        "nope_full_layers": [pattern.nope_full_layers for pattern in patterns],
        **difference._asdict(),
        "jaccard_distance_of_full": compare_masks(~masks[0], ~masks[1]).jaccard_distance,
        "layers": list(_differences(masks[0], masks[1])),
    }
    scores = [np.array(pattern.provenance.get("scores", {}), object) for pattern in patterns]
    if scores[0].shape == scores[1].shape != ():
        report["rank_correlation"] = rank_correlation(*(array.astype(float) for array in scores))
    print_report(report, "\n".join(_difference_lines(report)), as_json)
    if swap is not None:
        swapped = _swapped(patterns[1], masks, {"first": first, "second": second, "seed": seed})
        swapped.to_json(swap)
        typer.echo(f"{swapped}\nwritten to {swap}", err=as_json)


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


def _differences(first: np.ndarray, second: np.ndarray) -> Iterator[dict[str, Any]]:
    """The layers in which one of two masks [L, K] of full heads windows what the other does not, with those heads."""
    for layer in range(len(first)):
        only = ~first[layer] & second[layer], first[layer] & ~second[layer]
        for who, heads in zip(("first", "second"), only, strict=True):
            if heads.any():
                yield {"layer": layer, "only": who, "kv_heads": heads.nonzero()[0].tolist()}


def _difference_lines(report: dict[str, Any]) -> Iterator[str]:
    single = report["kv_heads"] == 1
    unit, counted = ("layers", "layers") if single else ("heads", "KV heads")
    for name, windowed in zip(report["patterns"], report["windowed"], strict=True):
        yield f"{name}: {windowed} of {report['of']} {counted} windowed ({windowed / report['of']:.1%})"
    for name, nope in zip(report["patterns"], report["nope_full_layers"], strict=True):
        if nope:
            yield f"{name}: full layers without rotary embeddings"
    yield (
        f"turnover {report['turnover']:.1%} of the first's windowed {unit} are not the second's "
        f"({report['relative_turnover']:.1%} of what the two counts allow)"
    )
    of_full = report["jaccard_distance_of_full"]
    yield f"Jaccard distance {report['jaccard_distance']:.3f}; of the full {unit} {of_full:.3f}"
    if "rank_correlation" in report:
        yield f"rank correlation of the scores {report['rank_correlation']:.2f} (Spearman)"
    for one in report["layers"]:
        which = "it" if single else f"KV heads {one['kv_heads']}"
        yield f"layer {one['layer']}: only the {one['only']} windows {which}"


def _swapped(pattern: AttentionPattern, masks: Sequence[np.ndarray], provenance: dict[str, Any]) -> AttentionPattern:
    from swa_jax.select.heads import head_pattern, swap_back

    if pattern.sliding_window is None:
        raise ConfigError(f"{provenance['second']} windows nothing: there is nothing to swap")
    full = swap_back(masks[0], masks[1], provenance["seed"])
    swapped = head_pattern(full, pattern.window, {"method": "swap"} | provenance)
    return dataclasses.replace(swapped, nope_full_layers=pattern.nope_full_layers)
