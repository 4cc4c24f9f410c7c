"""Tables for the terminal, as wide as it is, and those of patterns: what each keeps and costs."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table as RichTable
from rich.text import Text

from swa_jax.report.numbers import MEGABYTE, Row, with_interval

WITHOUT_TERMINAL = 125  # columns, where nothing says how wide the output is
# Columns to which text may be wrapped, beside whole numbers and beside wrapped ones; then a table becomes a list.
NARROWEST_TEXT = {False: 28, True: 14}
BETWEEN = 2  # spaces between columns
INDENT = "  "


def table_console() -> Console:
    """A console as wide as the terminal; where the output is none, as wide as $COLUMNS says, or 125 columns."""
    console = Console()
    known = console.is_terminal or "COLUMNS" in os.environ
    return console if known else Console(width=WITHOUT_TERMINAL)


@dataclasses.dataclass(frozen=True)
class Column:
    """A column: its title, the unit of its numbers, and whether it holds text, which may be wrapped."""

    title: str
    unit: str = ""
    text: bool = False


@dataclasses.dataclass
class Table:
    """A table that takes the widest of three forms that fits: one line a row; cells wrapped; a list of `title: cell`.

    A newline in a cell is where the second form breaks it. Nothing is cut off in any form.
    """

    title: str
    columns: Sequence[Column]
    notes: Sequence[str] = ()  # below the table, a paragraph each
    rows: list[Sequence[str]] = dataclasses.field(default_factory=list)

    def add_row(self, *cells: str) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"the row has {len(cells)} cells, but there are {len(self.columns)} columns")
        self.rows.append(cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self.title, style="bold")
        notes = list(self.notes)
        for narrow in (False, True):
            if (widths := self._widths(narrow, options.max_width)) is not None:
                yield self._as_table(narrow, widths)
                units = [f"{column.title} in {column.unit}" for column in self.columns if column.unit]
                if narrow and units:
                    notes.insert(0, "; ".join(units) + ".")
                break
        else:
            yield from self._as_list()
        for note in notes:
            yield Text(note, style="dim")
        yield Text()

    def _widths(self, narrow: bool, available: int) -> list[int] | None:
        """The width of each column; None where they do not fit. Text gets what numbers leave."""
        least, most = [], []
        for place, column in enumerate(self.columns):
            title = _header(column, narrow).split(None if narrow else "\n")
            cells = [row[place] for row in self.rows]
            lines = [line for cell in cells for line in (cell.split("\n") if narrow else [_one_line(cell)])]
            most.append(max(map(cell_len, [*title, *lines]), default=0))
            least.append(min(most[-1], NARROWEST_TEXT[narrow]) if column.text else most[-1])
        left = available - sum(least) - BETWEEN * (len(least) - 1)
        if left < 0:
            return None
        widths = least
        while left > 0 and (short := [i for i, width in enumerate(widths) if width < most[i]]):
            widths[min(short, key=lambda i: widths[i])] += 1  # the narrowest of those that want more
            left -= 1
        return widths

    def _as_table(self, narrow: bool, widths: Sequence[int]) -> RichTable:
        table = RichTable(box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, BETWEEN - 1, 0, 0))
        for column, width in zip(self.columns, widths, strict=True):
            justify: Literal["left", "right"] = "left" if column.text else "right"
            table.add_column(
                Text(_header(column, narrow)), justify=justify, width=width, overflow="fold", vertical="top"
            )
        for row in self.rows:
            cells = row if narrow else [_one_line(cell) for cell in row]
            table.add_row(*(Text(_wrap(*place)) for place in zip(cells, widths, strict=True)))
        return table

    def _as_list(self) -> Iterator[Text]:
        """Each row: the text cells that lead it as a heading, and below it a line for each other cell."""
        leading = next((i for i, column in enumerate(self.columns) if not column.text), len(self.columns))
        width = max((cell_len(column.title) for column in self.columns[leading:]), default=0)
        for row in self.rows:
            yield Text(", ".join(_one_line(cell) for cell in row[:leading] if cell), style="bold")
            for column, cell in zip(self.columns[leading:], row[leading:], strict=True):
                if cell:
                    unit = f" {column.unit}" if column.unit else ""
                    yield Text(f"{INDENT}{column.title:{width}}  {_one_line(cell)}{unit}")
            yield Text()


def _one_line(cell: str) -> str:
    return cell.replace("\n", " ")


def _wrap(cell: str, width: int) -> str:
    """The cell in lines of this width, broken at spaces and inside names after `-`, `+`, `/`, `_` or `,`."""
    lines = [""]
    for piece in re.findall(r"\n|[^\s+/_,-]*[ +/_,-]?", cell):
        if piece == "\n" or cell_len((lines[-1] + piece).rstrip()) > width:
            lines.append("")
        lines[-1] += piece.strip("\n")
    return "\n".join(line for line in lines if line)


def _header(column: Column, narrow: bool) -> str:
    return column.title + ("" if narrow or not column.unit else f"\n({column.unit})")


# ---- patterns ----


NEEDLES_FOUND = ("Needles found", "share of hidden numbers the model repeats correctly")


def pattern_table(rows: Sequence[Row], found: tuple[str, str] = NEEDLES_FOUND) -> Table:
    """The rows of `evaluate`'s report: what each pattern keeps and costs.

    `found`: the name of what it keeps, and a few words that say what that is.
    """
    title, share = found
    table = Table(
        "What each attention pattern keeps and costs",
        [
            Column("Pattern", text=True),
            Column("Full layers", text=True),
            Column(title),
            Column("Answer loss", "nats/token"),
            Column("KV cache", "MB/sequence"),
            Column("Prefill", "ms/prompt"),
            Column("Decode", "tokens/s"),
        ],
        (
            "Read it against 'full': a good pattern keeps nearly as much with much less memory.",
            f"{title}: {share}, 95 % interval in brackets.",
            "Answer loss: how surprising the right answer is to the model; lower is better.",
            "+fa-decode: the answer is written with full attention, so the whole prompt stays in memory.",
        ),
    )
    for row in rows:
        table.add_row(
            row["name"],
            _layer_list(row["full_layers"], row.get("num_layers")),
            with_interval(row["needle_accuracy"], row.get("needle_interval"), percent, " %"),
            f"{row['answer_nll']:.2f}",
            f"{row['kv_cache_bytes'] / MEGABYTE:.2f}",
            f"{1000 * row['prefill_seconds']:.0f}",
            f"{row['decode_tokens_per_second']:.0f}",
        )
    return table


def compare_table(summed: Sequence[Row], window: int | None, memory: str = "KV cache") -> Table:
    """The rows of `compare`'s summary; `window`: what methods choose for, and recipes without one have; `memory`: what
    `kv_cache_bytes` is of."""
    against = next((row["against"] for row in summed if "against" in row), None)
    table = Table(
        "What each choice keeps and costs",
        [
            Column("Pattern or method", text=True),
            Column("Windowed"),
            Column("Found"),
            Column("By seed"),
            Column("Answer loss", "nats/token"),
            Column(memory, "MB/sequence"),
            *([Column(f"Found against {against}"), Column(f"Loss against {against}")] if against else []),
        ],
        (
            *([] if window is None else [f"Windows of {window} keys, but for pattern files, which have their own."]),
            f"Windowed: the share of KV heads. {memory}: at 2 bytes a number.",
            "Found: needles, %, with the 95 % interval over prompts of the mean over seeds. Teacher-forced: every "
            "token of the answer's value is the likeliest.",
        ),
    )
    for row in summed:
        gaps = [(row.get("gap"), percent), (row.get("loss_gap"), "{:+.2f}".format)]
        table.add_row(
            row["name"],
            "" if row["ratio"] is None else f"{row['ratio']:.0%}",
            with_interval(row["needle_accuracy"], row.get("needle_interval"), percent),
            "" if row["ratio"] is None else ", ".join(percent(value) for value in row["by_seed"]),
            with_interval(row["answer_nll"], row.get("answer_nll_interval"), "{:.2f}".format),
            f"{row['kv_cache_bytes'] / MEGABYTE:.2f}",
            *([with_interval(gap[0], gap[1:], form) if gap else "" for gap, form in gaps] if against else []),
        )
    return table


def percent(value: float) -> str:
    return f"{100 * value:.0f}"


def _layer_list(layers: Sequence[int], num_layers: int | None) -> str:
    if not layers:
        return "none"
    return "all" if len(layers) == num_layers else ", ".join(map(str, layers))
