"""Tables for the terminal, as wide as it is, and those of patterns: what each keeps and costs."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

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


# ---- tables of rows, by their columns ----

type Shown = tuple[Column, Callable[[Any], str]]  # a column, and what its cell is for a row


def table_of(title: str, rows: Sequence[Any], columns: Sequence[Shown | None], notes: Sequence[str] = ()) -> Table:
    """One line a row; a column that is None is left out."""
    shown = [column for column in columns if column is not None]
    table = Table(title, [column for column, _ in shown], notes)
    for row in rows:
        table.add_row(*(cell(row) for _, cell in shown))
    return table


def text(title: str, key: str) -> Shown:
    return Column(title, text=True), lambda row: str(row[key])


def number(title: str, key: str, unit: str = "", form: str = "", per: float = 1, none: str = "") -> Shown:
    """`per`: what the unit is of the row's number. `none`: what stands where there is none."""

    def cell(row: Row) -> str:
        value = row[key]
        return none if value is None else format(value if per == 1 else value / per, form)

    return Column(title, unit), cell


def percent(value: float) -> str:
    return f"{100 * value:.0f}"


def score(
    title: str,
    key: str = "score",
    form: Callable[[float], str] = percent,
    sign: str = " %",
    unit: str = "",
    interval: str = "interval",
) -> Shown:
    """A mean with its interval in brackets."""
    return Column(title, unit), lambda row: with_interval(row[key], row.get(interval), form, sign)


# ---- patterns ----


PATTERN = text("Pattern", "name")


def pattern_table(rows: Sequence[Row]) -> Table:
    """The rows of `evaluate needles`: what each pattern keeps and costs."""

    def full_layers(row: Row) -> str:
        layers = row["full_layers"]
        if not layers:
            return "none"
        return "all" if len(layers) == row.get("num_layers") else ", ".join(map(str, layers))

    return table_of(
        "What each attention pattern keeps and costs",
        rows,
        [
            PATTERN,
            (Column("Full layers", text=True), full_layers),
            score("Needles found", "needle_accuracy", interval="needle_interval"),
            number("Answer loss", "answer_nll", "nats/token", ".2f"),
            number("KV cache", "kv_cache_bytes", "MB/sequence", ".2f", MEGABYTE),
            number("Prefill", "prefill_seconds", "ms/prompt", ".0f", 1e-3),
            number("Decode", "decode_tokens_per_second", "tokens/s", ".0f"),
        ],
        (
            "Read it against 'full': a good pattern keeps nearly as much with much less memory.",
            "Needles found: share of hidden numbers the model repeats correctly, 95 % interval in brackets.",
            "Answer loss: how surprising the right answer is to the model; lower is better.",
            "+fa-decode: the answer is written with full attention, so the whole prompt stays in memory.",
        ),
    )


def compare_table(summed: Sequence[Row], window: int | None, memory: str = "KV cache") -> Table:
    """The rows of `compare`'s summary; `window`: what methods choose for, and recipes without one have; `memory`: what
    `kv_cache_bytes` is of."""
    against = next((row["against"] for row in summed if "against" in row), None)

    def of_choice(title: str, form: Callable[[Row], str]) -> Shown:
        return Column(title), lambda row: "" if row["ratio"] is None else form(row)

    def gap(title: str, key: str, form: Callable[[float], str]) -> Shown | None:
        if against is None:
            return None
        return Column(
            f"{title} against {against}"
        ), lambda row: with_interval(row[key][0], row[key][1:], form) if row.get(key) else ""

    return table_of(
        "What each choice keeps and costs",
        summed,
        [
            text("Pattern or method", "name"),
            of_choice("Windowed", lambda row: f"{row['ratio']:.0%}"),
            score("Found", "needle_accuracy", sign="", interval="needle_interval"),
            of_choice("By seed", lambda row: ", ".join(map(percent, row["by_seed"]))),
            score("Answer loss", "answer_nll", "{:.2f}".format, "", "nats/token", "answer_nll_interval"),
            number(memory, "kv_cache_bytes", "MB/sequence", ".2f", MEGABYTE),
            of_choice("Read to choose, tokens", lambda row: f"{row['tokens']:,.0f}"),
            of_choice("TFLOP", lambda row: f"{row['flops'] / 1e12:.3g}"),
            of_choice("Seconds", lambda row: f"{row['seconds']:.0f}"),
            gap("Found", "gap", percent),
            gap("Loss", "loss_gap", "{:+.2f}".format),
        ],
        (
            *([] if window is None else [f"Windows of {window} keys, but for pattern files, which have their own."]),
            f"Windowed: the share of KV heads. {memory}: at 2 bytes a number.",
            "Found: needles, %, with the 95 % interval over prompts of the mean over seeds. Teacher-forced: every "
            "token of the answer's value is the likeliest.",
            "Read to choose: tokens through the model, without gradients; TFLOP: with them, at full attention.",
        ),
    )
