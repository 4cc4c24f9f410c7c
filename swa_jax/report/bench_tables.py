"""Tables of what `swa-jax bench` measured and of what `swa-jax data` read. Rows are those of their JSON."""

from __future__ import annotations

from collections.abc import Sequence

from swa_jax.report.numbers import MEGABYTE, Row
from swa_jax.report.tables import Column, Table

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
    table = Table(
        title,
        [
            Column("Candidate", text=True),
            Column("Time", "ms"),
            Column(f"Time over {reference}'s"),
            Column("Quartiles"),
            Column("Not measured, because", text=True),
        ],
    )
    for result in results:
        if result["ratio"] is None:
            table.add_row(result["name"], "–", "–", "–", result["missing"])
        else:
            milliseconds = f"{1e3 * (result['seconds'] or 0):.3f}"
            quartiles = f"{result['low']:.2f} – {result['high']:.2f}"
            table.add_row(result["name"], milliseconds, f"{result['ratio']:.2f}", quartiles, "")
    return table


def generation_table(rows: Sequence[Row], title: str) -> Table:
    """Memory and speed of each share of windowed KV heads, and their ratio to the first."""
    measures = (
        ("KV cache", "MB/sequence", "kv_cache_bytes", lambda value: f"{value / MEGABYTE:.2f}"),
        ("Prefill", "tokens/s", "prefill_tokens_per_second", "{:,.0f}".format),
        ("Decode", "tokens/s", "decode_tokens_per_second", "{:,.0f}".format),
    )
    columns = [Column("Windowed KV heads")]
    for name, unit, *_ in measures:
        columns += [Column(name, unit), Column(f"{name}, to the first")]
    table = Table(title, columns)
    for row in rows:
        cells = [f"{row['ratio']:.0%} ({row['windowed_heads']})"]
        for _, _, key, form in measures:
            cells += [form(row[key]), f"{row[f'{key}_ratio']:.2f}"]
        table.add_row(*cells)
    return table


def source_table(sources: Sequence[Row], title: str) -> Table:
    """What training reads of each source. Rows are those of `swa_jax.data.summary.SourceSummary`."""
    table = Table(
        title,
        [
            Column("Source", text=True),
            *(Column(name) for name in ("Documents", "Tokens", "Share", "Padding", "Held-out tokens", "Too long")),
        ],
    )
    for row in sources:
        table.add_row(
            row["name"],
            "no end" if row["documents"] is None else f"{row['documents']:,}",
            "no end" if row["tokens"] is None else f"{row['tokens']:,}",
            f"{row['share']:.1%}",
            f"{row['padding']:.1%}",
            f"{row['held_out_tokens']:,}",
            f"{row['left_out']:,}",
        )
    return table


def _sources(ops: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(op["source"] for op in ops))


def _sum(ops: Sequence[Row]) -> int:
    return sum(op["cycles"] or 0 for op in ops)


def _number(value: float | None, form: str) -> str:
    return "no figure" if value is None else format(value, form)
