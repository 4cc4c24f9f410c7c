"""Tables of what `swa-jax bench` measured and of what `swa-jax data` read. Rows are those of their JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from swa_jax.report.numbers import MEGABYTE, Row
from swa_jax.report.tables import Column, Shown, Table, number, table_of, text

HOW_TO_READ_CYCLES = """Compiled by libtpu, not run.
simulated: by libtpu, transfers included. bundles x visits: instruction words of the compiled code times how often they
run, without waits. Memory traffic of XLA's own ops is in neither.
'>': a part has no figure. ms: at the chip's clock (v5p: two cores as one; v7x: one core)."""


def cycles_table(measurement: Row, num_ops: int) -> Table:
    """The total, and below it the most expensive ops."""
    ops = measurement["ops"]
    settings = "".join(f" {name}={value}" for name, value in measurement["settings"].items())
    table = Table(
        f"{measurement['function']}{settings} on {measurement['chip']}",
        [
            Column("Op", text=True),
            Column("Cycles"),
            Column("Cycles per 1024 rows and head"),
            Column("Time", "ms"),
            Column("Temporary", "bytes"),
            Column("How", text=True),
        ],
    )
    table.add_row(
        "all",
        f"{'> ' if measurement['cycles'] is None else ''}{_sum(ops):,}",
        _number(measurement["cycles_per_1024_rows_and_head"], ",.0f"),
        _number(measurement["milliseconds"], ".4f"),
        _number(measurement["temp_bytes"], ","),
        "; ".join([*_sources([op for op in ops if op["cycles"] is not None]), *measurement["notes"]]),
    )
    for op in ops[:num_ops]:
        table.add_row(f"  {op['name']}", _number(op["cycles"], ","), "", "", "", op["source"])
    if num_ops and (rest := ops[num_ops:]):
        sources = _sources(rest)
        table.add_row(f"  {len(rest)} more", f"{_sum(rest):,}", "", "", "", sources[0] if len(sources) == 1 else "")
    return table


def attention_table(case: Row, title: str) -> Table:
    """The candidates of one case side by side; `case` is a row of the JSON, `title` its case and device in words."""
    results = case["results"]
    reference = next((result["name"] for result in results if result["ratio"] is not None), "nothing")

    def measured(title: str, form: Callable[[Row], str], unit: str = "") -> Shown:
        return Column(title, unit), lambda row: "–" if row["ratio"] is None else form(row)

    columns = [
        text("Candidate", "name"),
        measured("Time", lambda row: f"{1e3 * (row['seconds'] or 0):.3f}", "ms"),
        measured(f"Time over {reference}'s", lambda row: f"{row['ratio']:.2f}"),
        measured("Quartiles", lambda row: f"{row['low']:.2f} – {row['high']:.2f}"),
        (Column("Not measured, because", text=True), lambda row: row["missing"] or ""),
    ]
    return table_of(title, results, columns)


def generation_table(rows: Sequence[Row], title: str) -> Table:
    """Memory and speed of each share of windowed KV heads, and their ratio to the first."""
    columns: list[Shown] = [(Column("Windowed KV heads"), lambda row: f"{row['ratio']:.0%} ({row['windowed_heads']})")]
    for name, key, *form in (
        ("KV cache", "kv_cache_bytes", "MB/sequence", ".2f", MEGABYTE),
        ("Prefill", "prefill_tokens_per_second", "tokens/s", ",.0f"),
        ("Decode", "decode_tokens_per_second", "tokens/s", ",.0f"),
    ):
        columns += [number(name, key, *form), number(f"{name}, to the first", f"{key}_ratio", form=".2f")]
    return table_of(title, rows, columns)


def source_table(sources: Sequence[Row], title: str) -> Table:
    """What training reads of each source. Rows are those of `swa_jax.data.summary.SourceSummary`."""
    columns = [
        text("Source", "name"),
        number("Documents", "documents", form=",", none="no end"),
        number("Tokens", "tokens", form=",", none="no end"),
        number("Share", "share", form=".1%"),
        number("Padding", "padding", form=".1%"),
        number("Held-out tokens", "held_out_tokens", form=","),
        number("Too long", "left_out", form=","),
    ]
    return table_of(title, sources, columns)


def _sources(ops: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(op["source"] for op in ops))


def _sum(ops: Sequence[Row]) -> int:
    return sum(op["cycles"] or 0 for op in ops)


def _number(value: float | None, form: str) -> str:
    return "no figure" if value is None else format(value, form)
