"""What all kinds of measurement share: their options, the model under its patterns, and where results go."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from swa_jax.cli.groups import Options
from swa_jax.cli.options import (
    OUTPUT,
    PATTERN,
    BatchSize,
    ComputeDtype,
    FullDecode,
    Model,
    Overrides,
    Seed,
    SinkTokens,
    Window,
    Yarn,
    check_output,
    find_model,
    load_checkpoint,
    with_patterns,
)
from swa_jax.errors import ConfigError
from swa_jax.files import read_json, write_json

if TYPE_CHECKING:
    from swa_jax.data.tokenizer import Tokenizer
    from swa_jax.evaluate.samples import Samples
    from swa_jax.model.decoder import Decoder
    from swa_jax.report.tables import Table


class Evaluation(Options):
    """One model under its patterns, loaded when first asked for, and what is measured of it."""

    def __init__(
        self,
        model: Model,
        pattern: Annotated[
            list[str] | None,
            Option(
                "--pattern",
                help="A recipe or a pattern JSON, repeatable. Default: the checkpoint's own.",
                show_default=False,
                rich_help_panel=PATTERN,
            ),
        ] = None,
        window: Window = None,
        sink_tokens: SinkTokens = None,
        fa_decode: FullDecode = None,
        yarn: Yarn = None,
        batch_size: BatchSize = 16,
        dtype: ComputeDtype = None,
        seed: Seed = 0,
        out: Annotated[
            Path | None,
            Option(
                "--out",
                help="Write results.json, samples.jsonl and pictures to this folder. Several kinds can share it. "
                "The same command goes on after an interruption.",
                rich_help_panel=OUTPUT,
            ),
        ] = None,
    ):
        self.model, self.yarn, self.dtype = model, yarn, dtype
        self.sources, self.overrides = pattern or [], Overrides(window, sink_tokens, fa_decode)
        self.batch_size, self.seed, self.out = batch_size, seed, out
        self._kind = ""
        self._settings: dict[str, Any] = {}
        self._results: dict[str, Any] = {}
        if out is not None:
            self._results = _read(out / "results.json")
            check_output("--out", out / "results.json")

    def begin(self, kind: str, **settings: Any) -> None:
        """Say what will be measured, by which settings.

        Raises `ConfigError` if the folder has it already, or has begun it with other settings.
        """
        plain = {name: value if _is_plain(value) else str(value) for name, value in settings.items()}
        plain |= {"batch_size": self.batch_size, "seed": self.seed}
        before = self._results.get("settings", {}).get(kind)
        other = "name another folder with --out, or move it away"
        if before is not None and kind not in self._results.get("unfinished", []):
            raise ConfigError(f"{self.out} has results of `evaluate {kind}` already: {other}")
        if before is not None and before != plain:
            name = next(name for name in {**before, **plain} if before.get(name) != plain.get(name))
            raise ConfigError(
                f"{self.out} has an `evaluate {kind}` that was interrupted, with {name} = {before.get(name)} and not "
                f"{plain.get(name)}: repeat that command to go on, {other}"
            )
        self._kind, self._settings = kind, {kind: plain}

    @functools.cached_property
    def checkpoint(self) -> Path:
        return find_model(self.model)

    @functools.cached_property
    def _loaded(self) -> tuple[Decoder, Tokenizer]:
        return load_checkpoint(self.checkpoint, self.dtype, yarn=self.yarn)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._loaded[1]

    @functools.cached_property
    def models(self) -> list[tuple[str, Decoder]]:
        """The model under each pattern, by the pattern's name."""
        models = with_patterns(self._loaded[0], self.sources, self.overrides)
        measured = {
            "model": str(self.checkpoint),
            "yarn": self.yarn,
            "dtype": self.dtype,
            "patterns": {
                name: {
                    "sliding_window": model.pattern.sliding_window,
                    "num_sink_tokens": model.pattern.num_sink_tokens,
                    "full_attention_decode": model.pattern.full_attention_decode,
                    "full_layers": list(model.pattern.full_layers),
                }
                for name, model in models
            },
        }
        for name, value in measured.items():
            if self._results and self._results.get(name) != value:
                raise ConfigError(
                    f"{self.out} has results with another '{name}': name another folder with --out, or move it away"
                )
        settings = self._results.get("settings", {}) | self._settings
        unfinished = sorted({*self._results.get("unfinished", []), self._kind})
        self._results |= measured | {"settings": settings, "unfinished": unfinished}
        return models

    def samples(self, model: Decoder) -> Samples:
        """Where what is known of each example is kept and found again: `samples.jsonl`, if there is an --out."""
        from swa_jax.checkpoint.folder import weights_sum
        from swa_jax.settings import to_dict

        if self.out is None:
            return self._samples
        context = {
            "weights": weights_sum(self.checkpoint),
            "config": to_dict(model.config),
            "dtype": model.embedding[...].dtype.name,
            "pattern": to_dict(dataclasses.replace(model.pattern, provenance={})),
        }
        return self._samples.under(context)

    @functools.cached_property
    def _samples(self) -> Samples:
        from swa_jax.evaluate.samples import Samples

        return Samples(None if self.out is None else self.out / "samples.jsonl")

    def tokens(self, text: Path) -> list[int]:
        """The tokens of a text, without start tokens: those stand before each sequence that it is cut into."""
        from swa_jax.data.haystack import read_text

        tokens = self.tokenizer.encode(read_text([text]))
        if not tokens:
            raise ConfigError(f"{text} is empty: name a text with some words in it")
        return tokens

    def save(self, key: str, rows: Sequence[dict[str, Any]]) -> None:
        """Write what is measured so far, so that an interruption does not cost it."""
        self._results[key] = rows
        if self.out is not None:
            write_json(self.out / "results.json", self._results)

    def finish(
        self,
        key: str,
        rows: Sequence[dict[str, Any]],
        table: Callable[[Sequence[dict[str, Any]]], Table],
        draw: Callable[[Path], object] = lambda folder: None,
    ) -> None:
        """Print the table, write the results, and draw a picture into their folder."""
        from swa_jax.report import table_console

        table_console().print(table(rows))
        unfinished = [kind for kind in self._results.pop("unfinished", []) if kind != self._kind]
        if unfinished:
            self._results["unfinished"] = unfinished
        self.save(key, rows)
        if self.out is not None:
            draw(self.out)
            typer.echo(f"written to {self.out}")


def _read(file: Path) -> dict[str, Any]:
    """The results that a folder has already, of other kinds."""
    if not file.exists():
        return {}
    try:
        results = read_json(file)
    except ConfigError:
        results = {}
    if not isinstance(results.get("settings"), dict):
        raise ConfigError(f"{file.parent} has results already: name another folder with --out, or move it away")
    return results


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list)
