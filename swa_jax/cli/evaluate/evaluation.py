"""What all kinds of measurement share: their options, the model under its patterns, and the loop that measures."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import RenderableType

from swa_jax.base.errors import ConfigError
from swa_jax.base.files import alone, check_content, digest, read_document, sum_of_file, write_json
from swa_jax.cli.options import (
    BatchSize,
    ComputeDtype,
    Json,
    Model,
    Seed,
    WindowGiven,
    Yarn,
    check_output,
    choose_patterns,
    few_prompts,
    find_model,
    in_output,
    in_pattern,
    in_prompts,
    note_context,
    open_model,
    print_report,
)

if TYPE_CHECKING:
    from swa_jax.checkpoint.folder import Checkpoint
    from swa_jax.data.tokenizer import Tokenizer
    from swa_jax.evaluate.samples import Samples
    from swa_jax.model.config import ModelConfig
    from swa_jax.model.decoder import Decoder
    from swa_jax.model.pattern import AttentionPattern


Lengths = Annotated[str, in_prompts(metavar="N,N", help="Tokens of a prompt with its answer, such as 4096,8192.")]
Examples = Annotated[
    int,
    in_prompts(
        metavar="N",
        help="Prompts, of each task, length and depth where there are several.",
        min=1,
        callback=few_prompts,
    ),
]
Depths = Annotated[
    str | None,
    in_prompts(
        help="Where in the prompt the answer is, as fractions such as 0,0.5,1. Default: drawn; for needles, six steps."
    ),
]
MaxLength = Annotated[
    int | None, in_prompts(metavar="N", help="Tokens of a prompt with its answer. Default: the model's context.", min=1)
]
MaxNewTokens = Annotated[
    int | None,
    in_prompts(metavar="N", help="Tokens of an answer. Default: as the task has it; 512 for --problems.", min=1),
]
type Rows = list[dict[str, Any]]
ANOTHER = "name another folder with --out, or move it away"


class Run(NamedTuple):
    """What a measurement runs with: the model under each pattern, and options of the functions that measure."""

    models: Sequence[tuple[str, Decoder]]
    plain: dict[str, Any]  # `batch_size`, and `advance`, which is told how many more of what is counted are done
    kept: Callable[[Decoder], dict[str, Any]]  # the same for a model, and `samples`, of what is known of its examples


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A kind of measurement, declared: `Evaluation.carry_out` does the same with all kinds.

    Attributes:
      key: of the rows in results.json.
      counted: what is counted on the way, for the progress line; total: how many of them there are for one model.
      measure: gives rows as they are known.
      table: shows the rows; draw: writes a picture of them into a folder.
      longest: tokens of the longest sequence, which may be more than the model's context.
      by_model: rows stand in the order of the models, and not as they come.
    """

    key: str
    counted: str
    total: int
    measure: Callable[[Run], Iterator[Rows]]
    table: Callable[[Rows], RenderableType]
    draw: Callable[[Rows, Path], object] = lambda rows, folder: None
    longest: int = 0
    by_model: bool = True


@dataclasses.dataclass(kw_only=True)
class Evaluation(WindowGiven):
    """One model under its patterns, loaded when first asked for, and what is measured of it."""

    model: Model
    pattern: Annotated[
        list[str] | None, in_pattern(help="A recipe or a pattern JSON, repeatable. Default: the checkpoint's own.")
    ] = None
    yarn: Yarn = None
    batch_size: BatchSize = 16
    dtype: ComputeDtype = None
    seed: Seed = 0
    out: Annotated[
        Path | None,
        in_output(
            help="Write results.json, samples.jsonl and pictures to this folder. Several kinds can share it. "
            "The same command goes on after an interruption."
        ),
    ] = None
    as_json: Json = False
    results: dict[str, Any] = dataclasses.field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._kind, self._is_finished = "", False
        self._settings: dict[str, Any] = {}

    @contextlib.contextmanager
    def in_folder(self) -> Iterator[None]:
        """The folder for this process alone, and its results read: they are written whole, those of all kinds."""
        if self.out is None:
            yield
            return
        check_output("--out", self.out / "results.json")
        with alone(self.out, "writing results to"):
            self.results = read_document(self.out / "results.json", "results of `evaluate`", "settings", ANOTHER)
            yield

    def begin(self, kind: str, **settings: Any) -> None:
        """Say what will be measured, by which settings.

        Raises `ConfigError` if the folder has it, or has begun it, with other settings.
        """
        plain = {name: _plain(value) for name, value in settings.items()}
        plain |= {"batch_size": self.batch_size, "seed": self.seed}
        before = self.results.get("settings", {}).get(kind)
        self._is_finished = before is not None and kind not in self.results.get("unfinished", [])
        if before is not None and self.out is not None:
            found, advice = f"results of `evaluate {kind}`", ANOTHER
            if not self._is_finished:
                found, advice = f"an interrupted `evaluate {kind}`", f"repeat that command to go on, {ANOTHER}"
            check_content(self.out, found, before, plain, advice)
        self._kind, self._settings = kind, {kind: plain}

    @functools.cached_property
    def checkpoint(self) -> Path:
        return find_model(self.model)

    @functools.cached_property
    def _opened(self) -> tuple[Checkpoint, Tokenizer]:
        return open_model(self.checkpoint, self.yarn)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._opened[1]

    @functools.cached_property
    def patterns(self) -> list[tuple[str, AttentionPattern]]:
        """The patterns by name, none of which contradicts the results that the folder has."""
        from swa_jax.checkpoint.folder import content_sum

        patterns = choose_patterns(self._opened[0], self.pattern or [], self.as_window)
        measured = {
            "model": str(self.checkpoint),
            "checkpoint": content_sum(self.checkpoint),
            "yarn": self.yarn,
            "dtype": self.dtype,
            "patterns": {name: _computed(pattern) for name, pattern in patterns},
        }
        if self.results and self.out is not None:
            check_content(self.out, "results", {name: self.results.get(name) for name in measured}, measured, ANOTHER)
        if not self._is_finished:
            settings = self.results.get("settings", {}) | self._settings
            unfinished = sorted({*self.results.get("unfinished", []), self._kind})
            self.results |= measured | {"settings": settings, "unfinished": unfinished}
        return patterns

    @property
    def config(self) -> ModelConfig:
        """The model's, once its patterns are found to be right."""
        assert self.patterns
        return self._opened[0].config

    @functools.cached_property
    def models(self) -> list[tuple[str, Decoder]]:
        """The model under each pattern, by the pattern's name."""
        from swa_jax.checkpoint.folder import load_model

        model = load_model(self._opened[0], dtype=self.dtype)
        return [(name, model if one == model.pattern else model.with_pattern(one)) for name, one in self.patterns]

    def tokens(self, text: Path) -> list[int]:
        """The tokens of a text, without start tokens: those stand before each sequence that it is cut into."""
        from swa_jax.data.haystack import read_text

        tokens = self.tokenizer.encode(read_text([text]))
        if not tokens:
            raise ConfigError(f"{text} is empty: name a text with some words in it")
        return tokens

    def carry_out(self, what: Measurement) -> None:
        """Measure, write what is known as it comes, print the table and draw the picture.

        Of what the folder has already the table is printed again.
        """
        from swa_jax.report.progress import counted

        note_context(self.config, what.longest)
        if self._is_finished:
            print_report(self.results, what.table(self.results[what.key]), self.as_json)
            typer.echo(f"{self.out} has these results already", err=True)
            return
        models, rows = self.models, list[dict[str, Any]]()
        order = {name: place for place, (name, _) in enumerate(models)}
        total = what.total * len(models)
        samples = self._samples(total)
        with counted(what.counted, total) as advance:
            plain = {"batch_size": self.batch_size, "advance": advance}
            for new in what.measure(Run(models, plain, lambda model: plain | {"samples": samples(model)})):
                rows += new
                if what.by_model:
                    rows.sort(key=lambda row: order[row["name"]])
                self._save(what.key, rows)
        unfinished = [kind for kind in self.results.pop("unfinished", []) if kind != self._kind]
        self.results |= {"unfinished": unfinished} if unfinished else {}
        self._save(what.key, rows)
        print_report(self.results, what.table(rows), self.as_json)
        if self.out is not None:
            what.draw(rows, self.out)
            typer.echo(f"written to {self.out}", err=self.as_json)

    def _save(self, key: str, rows: Rows) -> None:
        self.results[key] = rows
        if self.out is not None:
            write_json(self.out / "results.json", self.results)

    def _samples(self, total: int) -> Callable[[Decoder], Samples]:
        """Where what is known of the examples under a model is kept: in `samples.jsonl`, if there is an --out."""
        from swa_jax.base.settings import to_dict
        from swa_jax.checkpoint.folder import weights_sum
        from swa_jax.evaluate.samples import NO_SAMPLES, Samples

        if self.out is None:
            return lambda model: NO_SAMPLES
        samples, weights = Samples(self.out / "samples.jsonl", total), weights_sum(self.checkpoint)
        return lambda model: samples.under(
            {
                "weights": weights,
                "config": to_dict(model.config),
                "dtype": model.embedding[...].dtype.name,
                "pattern": _computed(model.pattern),
            }
        )


def _computed(pattern: AttentionPattern) -> dict[str, Any]:
    """What a pattern computes, as JSON; how it came about does not count."""
    from swa_jax.base.settings import to_dict

    plain: dict[str, Any] = to_dict(dataclasses.replace(pattern, provenance={}))
    return plain


def _plain(value: Any) -> Any:
    """A setting as JSON. Beside the name of a file or folder stands what it holds, which may change."""
    if not isinstance(value, Path):
        return value if value is None or isinstance(value, bool | int | float | str | list) else str(value)
    files = sorted(file for file in value.iterdir() if file.is_file()) if value.is_dir() else [value]
    sums = {file.name: sum_of_file(file) for file in files if file.is_file()}
    return f"{value} ({digest(sums)[:16]})" if sums else str(value)
