"""Cells that are measured once, kept, and shown in a table, which may go into a document."""

import argparse
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from swa_jax.base.errors import ConfigError
from swa_jax.base.estimates import Estimate
from swa_jax.base.files import Store, write_text

ROOT = Path(__file__).resolve().parents[2]
KIND = "cells of a comparison"


class Cell(NamedTuple):
    """What is measured at once. `measure` gives what JSON can hold; the first part of the key names it for --only.

    `settings`: what else the result depends on; a cell that is kept with others is refused.
    """

    key: tuple[Any, ...]
    measure: Callable[[], dict[str, Any]]
    settings: Callable[[], Any] = lambda: None


Done = dict[str, dict[str, Any]]  # by a cell's key as JSON


@dataclasses.dataclass(frozen=True)
class Comparison:
    """`report(done)`: the table of the cells that are done, and pictures in `out`: (file, caption).

    `mark`: names the place in a document, from `<!-- MARK -->` to the next `<!-- end of NAME -->`.
    """

    mark: str
    cells: Sequence[Cell]
    report: Callable[[Done], tuple[str, Sequence[tuple[str, str]]]]


def key_of(*key: Any) -> str:
    return json.dumps(key)


def run(comparison: Comparison, options: argparse.Namespace) -> str:
    """Measure what is missing, unless only a report is wanted; the table, which is written as well."""
    options.out.mkdir(parents=True, exist_ok=True)
    store = Store(options.out / "cells.jsonl", KIND)
    cells = [] if options.report_only else wanted(comparison.cells, options.only)
    new = []
    for cell in cells:
        settings, kept = json.loads(json.dumps(cell.settings())), store.records.get(key_of(*cell.key))
        if kept is None:
            new.append((cell, settings))
        elif kept["settings"] != settings:
            raise ConfigError(
                f"{options.out} has results of {cell.key} with other settings: name a new folder by --out"
            )
    for number, (cell, settings) in enumerate(new[: options.limit], 1):
        print(f"{time.strftime('%H:%M:%S')} {number} of {len(new)}: {cell.key}", file=sys.stderr, flush=True)
        begun = time.monotonic()
        measured = cell.measure()
        seconds = round(time.monotonic() - begun, 1)
        store.add(key_of(*cell.key), cell=cell.key, settings=settings, **measured, seconds=seconds)
    done = store.records
    text, pictures = comparison.report(done)
    write_text(options.out / "table.md", text + "\n")
    if options.docs:
        name = comparison.mark.split()[0].rstrip(":")
        put_into(options.docs, comparison.mark, name, text, [(options.out / file, said) for file, said in pictures])
    return text


def wanted(cells: Sequence[Cell], only: Sequence[str]) -> list[Cell]:
    """Those that --only names; all without it."""
    names = dict.fromkeys(str(cell.key[0]) for cell in cells)
    if unknown := [name for name in only if name not in names]:
        raise ConfigError(f"--only: there is no '{unknown[0]}'; there are: {'; '.join(names) or 'none'}")
    return [cell for cell in cells if str(cell.key[0]) in (only or names)]


def read_done(out: Path) -> Done:
    """The cells that are kept; a line that was cut off is none."""
    return Store(out / "cells.jsonl", KIND).records


def put_into(document: Path, mark: str, name: str, text: str, pictures: Sequence[tuple[Path, str]] = ()) -> None:
    """Replace what stands between the marks of a document; pictures go to `images/` beside it.

    Raises:
      ConfigError: the document does not have one of them, followed by the other; it stays as it was.
    """
    begin, end = f"<!-- {mark} -->\n", f"<!-- end of {name} -->"
    before, _, rest = document.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ConfigError(f"{document} has no '{begin.strip()}' followed by '{end}'")
    shown = []
    for file, caption in pictures:
        (document.parent / "images").mkdir(exist_ok=True)
        shutil.copy(file, document.parent / "images" / f"compare-{name}-{file.name}")
        shown.append(f"![{caption}](images/compare-{name}-{file.name})\n")
    write_text(document, f"{before}{begin}\n{text.rstrip()}\n\n{'\n'.join([*shown, ''])}{end}{after}")


def told(estimate: Estimate, form: str = ".0f", sign: str = "", scale: float = 100) -> str:
    """A mean, in percent unless `scale` says otherwise, and its interval where it has one: `12 [3, 20]`."""
    mean, *ends = (scale * one for one in (estimate.mean, *(estimate.interval or [])))
    return f"{mean:{sign}{form}}" + (f" [{', '.join(f'{end:{form}}' for end in ends)}]" if ends else "")


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    first = "|" + "|".join(f" {title} " if title else " " for title in head) + "|"
    return "\n".join([first, "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows)])
