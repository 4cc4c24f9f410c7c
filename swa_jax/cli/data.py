"""The verbs `swa-jax data tokenize` and `swa-jax data inspect`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Argument, Option

from swa_jax.base.errors import ConfigError
from swa_jax.base.settings import load_config
from swa_jax.cli.options import Json, print_report, show

if TYPE_CHECKING:
    from swa_jax.data.sources import SourceConfig
    from swa_jax.data.tokenizer import Tokenizer

app = typer.Typer(no_args_is_help=True, help="Tokenise training data ahead, and look at it.")


@app.command()
def tokenize(
    sources: Annotated[
        list[str], Argument(metavar="SRC...", help="Files (text, JSONL, Parquet, ArrayRecord), folders or globs.")
    ],
    tokenizer: Annotated[str, Option(help="tokenizer.json, or a model by any of its names.")],
    out: Annotated[Path, Option(help="Folder of the tokens; run again to go on after an interruption.")],
    field: Annotated[str, Option(help="The field of a record that has the text.")] = "text",
    kind: Annotated[
        Literal["text", "huggingface"], Option(help="text, or huggingface: SRC are folders of its data sets.")
    ] = "text",
    split: Annotated[str, Option(help="The split of Hugging Face data sets.")] = "train",
    shard_tokens: Annotated[int, Option(help="Tokens at which a shard ends.", min=1)] = 1 << 27,
) -> None:
    """Tokenise documents once, for training with a source of kind `tokens`."""
    from swa_jax.checkpoint.named import tokenizer_folder
    from swa_jax.data.sources import SourceConfig
    from swa_jax.data.tokenize import tokenize as run
    from swa_jax.report.progress import Progress

    source = SourceConfig(kind, tuple(sources), text_field=field, split=split)
    with Progress("files tokenised", at_once=False) as progress:
        made = run(source, tokenizer_folder(tokenizer), out, shard_tokens=shard_tokens, progress=progress.update)
    typer.echo(f"{out}: {made['tokens']:,} tokens, {made['documents']:,} documents, {len(made['shards'])} shards")
    if made["left_out"]:
        typer.echo(f"{made['left_out']:,} empty documents left out")


@app.command()
def inspect(
    path: Annotated[Path, Argument(help="A training configuration, or a folder of tokens.")],
    overrides: Annotated[
        list[str] | None, Argument(metavar="[a.b=c]...", help="Settings that replace those of the file.")
    ] = None,
    rows: Annotated[int, Option(help="First rows to print as text.", min=0)] = 2,
    length: Annotated[int, Option(help="Tokens a row, for a folder of tokens.", min=1)] = 512,
    as_json: Json = False,
) -> None:
    """Print sources, tokens, shares, padding and the first rows. A folder's every byte is verified."""
    from swa_jax.data.summary import first_rows, summarize
    from swa_jax.report.bench_tables import source_table

    if not path.exists():
        raise ConfigError(f"{path} does not exist: name a training configuration, or a folder of tokens")
    if path.is_dir() and overrides:
        raise ConfigError(f"{path} is a folder of tokens, which has no settings such as '{overrides[0]}'")
    tokenizer, tables = _folder(path, length, as_json) if path.is_dir() else _stages(path, overrides or [])
    found = []
    for title, sources, length, seed in tables:
        summaries = [dataclasses.asdict(one) for one in summarize(sources, tokenizer, length=length, seed=seed)]
        lines = list(first_rows(sources, tokenizer, length=length, seed=seed, rows=rows)) if rows else []
        found.append({"title": title, "sources": summaries, "rows": lines})
        if not as_json:
            show(source_table(summaries, title))
            typer.echo("".join(f"{line}\n" for line in lines), nl=False)
    print_report(found, None, as_json)


type Tables = list[tuple[str, Sequence[SourceConfig], int, int]]  # title, sources, tokens of a row, seed


def _folder(path: Path, length: int, as_json: bool) -> tuple[Tokenizer, Tables]:
    """What a folder of tokens holds, every byte verified."""
    from swa_jax.data.sources import SourceConfig
    from swa_jax.data.stored import read_manifest, verify
    from swa_jax.data.tokenizer import load_tokenizer
    from swa_jax.report.progress import Progress

    with Progress("bytes verified", at_once=False) as progress:
        verify(path, progress.update)
    typer.echo(f"{path}: every shard is as it was written", err=as_json)
    length = min(length, read_manifest(path)["tokens"])
    return load_tokenizer(path), [(f"rows of {length} tokens", [SourceConfig("tokens", (str(path),))], length, 0)]


def _stages(path: Path, overrides: list[str]) -> tuple[Tokenizer, Tables]:
    """What the stages of a training read, with the seeds that `train` gives them: their first rows are its first."""
    from swa_jax.checkpoint.named import load_tokenizer
    from swa_jax.train.config import TrainConfig

    config = load_config(TrainConfig, path, overrides)
    tables: Tables = []
    for number, stage in enumerate(config.stages):
        tokens = stage.steps * stage.batch_size * stage.sequence_length
        shape = f"{stage.batch_size} x {stage.sequence_length}"
        title = f"stage {number}: {stage.steps:,} steps of {shape}, {tokens:,} tokens"
        tables.append((title, stage.data, stage.sequence_length, config.seed + 1000 * number))
    return load_tokenizer(config.tokenizer), tables
