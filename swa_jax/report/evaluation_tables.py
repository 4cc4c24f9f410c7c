"""Tables of what `swa-jax evaluate` measured, by their columns. Rows are those of its results.json."""

from __future__ import annotations

from collections.abc import Sequence

from swa_jax.report.numbers import MEGABYTE, Row, with_interval
from swa_jax.report.tables import PATTERN, Column, Shown, Table, number, score, table_of, text


def _depth(rows: Sequence[Row]) -> Shown | None:
    """None where no row has a depth."""
    if all(row["depth"] is None for row in rows):
        return None
    return Column("Depth"), lambda row: "" if row["depth"] is None else f"{row['depth']:.0%}"


LENGTH = number("Length", "length")


def ruler_table(rows: Sequence[Row]) -> Table:
    """One line for every length, task and depth, the average last; one column a pattern."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    lines: dict[tuple[int, str, float | None], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault((row["length"], row["task"], row["depth"]), {})[row["name"]] = row
    ordered = [lines[place] for place in sorted(lines, key=lambda place: place[0])]
    notes = ["95 % interval in brackets (Wilson)."]
    if len(names) > 1:
        notes.append(f"After it: the difference from {names[0]} on the same prompts, in points, and its interval.")
    if any(row["task"].startswith("qa") for row in rows):
        notes.append("qa: 100 % where one of the right answers is there.")
    if data := dict.fromkeys(row["data"] for row in rows if row["data"] and row["task"] != "average"):
        notes.append(f"Data: {'; '.join(data)}.")

    def of_line(shown: Shown) -> Shown:
        return shown[0], lambda line: shown[1](next(iter(line.values())))

    def of_pattern(name: str) -> Shown:
        def cell(line: dict[str, Row]) -> str:
            row = line.get(name)
            if row is None:
                return ""
            digits = 1 if row["task"] == "average" else 0
            shown = with_interval(row["score"], row["interval"], lambda x: f"{100 * x:.{digits}f}", " %")
            points = with_interval(row["difference"], row["difference_interval"], lambda x: f"{100 * x:+.{digits}f}")
            return shown + (points and f"\n{points}")

        return Column(name), cell

    shown = [text("Task", "task"), LENGTH, _depth(rows), number("Prompts", "num_examples")]
    columns = [*(of_line(one) for one in shown if one is not None), *map(of_pattern, names)]
    return table_of("RULER: share of what is asked for that the answers have", ordered, columns, notes)


def chain_table(rows: Sequence[Row]) -> Table:
    """One line for every pattern, number of hops and of rivals, length and depth."""
    asked = "the sum of two numbers" if rows[0]["sums"] else "the number at a chain's end"
    notes = (
        "95 % interval in brackets (Wilson). Teacher-forced: every token of the answer is the likeliest.",
        f"The statements of a chain stand at least {rows[0]['gap']} tokens apart.",
    )
    hops, rivals = number("Hops", "hops"), number("Rivals", "rivals")
    columns = [PATTERN, hops, rivals, LENGTH, _depth(rows), score("Right"), number("Examples", "n")]
    return table_of(f"Chains: questions for {asked} answered, %", rows, columns, notes)


def sweep_table(rows: Sequence[Row]) -> Table:
    """One line a pattern and window, one column a length."""
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        star = "*" if row["past_training_length"] else ""
        window = "full" if row["window"] is None else str(row["window"])
        cells.setdefault((row["name"], window), {})[row["length"]] = with_interval(
            row["perplexity"], row.get("interval"), "{:.2f}".format, star
        )
    blocks = rows[0]["num_blocks"]
    interval = f"95 % bootstrap interval over {blocks} blocks of them" if blocks > 1 else "too few for an interval"
    notes = [f"The same {rows[0]['num_tokens']} tokens in every cell; {interval}."]
    if any(row["past_training_length"] for row in rows):
        notes.append("* longer than the context that the model's config names.")
    lines = [{"name": name, "window": window, "cells": line} for (name, window), line in cells.items()]

    def of_length(length: int) -> Shown:
        return Column(f"Length {length}"), lambda line: line["cells"].get(length, "")

    columns = [of_length(length) for length in dict.fromkeys(row["length"] for row in rows)]
    return table_of(
        "Perplexity by evaluation window and length", lines, [PATTERN, number("Window", "window"), *columns], notes
    )


def routing_table(rows: Sequence[Row]) -> Table:
    """One line a text or (task, length, depth)."""
    notes = (
        "Share of all queries of a text, or of those that predict an answer: mean over layers, 95 % interval.",
        "Keys read: of the KV cache, a token and layer. GFLOPs: forward, a token, only the branch that is taken.",
        "In round brackets: full attention's.",
    )
    depth = _depth(rows) or (Column("Depth"), lambda row: "")
    keys = Column("Keys read"), lambda row: f"{row['keys_read']:.0f}\n({row['keys_of_full']:.0f})"
    flops = Column("GFLOPs"), lambda row: f"{row['gflops']:.3g}\n({row['gflops_of_full']:.3g})"
    columns = [PATTERN, text("Data", "data"), LENGTH, depth, score("Full attention", "full_ratio"), keys, flops]
    return table_of("Routing: share of the queries that take full attention", rows, columns, notes)


def harness_table(rows: Sequence[Row]) -> Table:
    """One line a pattern, task and metric."""
    notes = (
        "95 % interval over documents in brackets, where the metric is a mean over them (Wilson for right or wrong, "
        "bootstrap otherwise).",
    )

    def metric(row: Row) -> str:
        return row["metric"] + ("" if row["filter"] == "none" else f" ({row['filter']})")

    documents = Column("Documents"), lambda row: str(row["n"] or "")
    columns = [
        PATTERN,
        text("Task", "task"),
        (Column("Metric", text=True), metric),
        score("Score", form="{:.4g}".format, sign=""),
        documents,
    ]
    return table_of("lm-evaluation-harness", rows, columns, notes)


def questions_table(rows: Sequence[Row]) -> Table:
    """One line a pattern and group of questions."""
    notes = (
        "Mean score of 100, 95 % interval over questions (Wilson for right or wrong, bootstrap otherwise).",
        "Left out: longer than the context (see --max-length, --cut-middle).",
    )
    scored = score("Score", form=lambda value: f"{100 * value:.1f}", sign="")
    counts = [
        number(title, key)
        for title, key in (("Questions", "num_questions"), ("Left out", "num_left_out"), ("Cut", "num_cut"))
    ]
    columns = [PATTERN, text("Benchmark", "benchmark"), text("Group", "group"), scored, *counts]
    return table_of("Questions", rows, columns, notes)


def efficiency_table(rows: Sequence[Row]) -> Table:
    """One line a pattern and length; in brackets how many times faster than the first pattern at that length."""
    notes = (
        f"{rows[0]['requests']} prompts at a time, {rows[0]['new_tokens']} tokens of answer; medians over "
        f"{len(rows[0]['token_seconds_all'])} rounds, the patterns in turn.",
        f"In brackets: times faster than {rows[0]['name']}. Throughput: prompts and answers. Memory: the weights and "
        "all caches.",
    )
    first = {row["length"]: row for row in reversed(rows)}

    def time(title: str, key: str) -> Shown:
        return Column(title, "ms"), lambda row: f"{1000 * row[key]:.3g}\n({first[row['length']][key] / row[key]:.2f})"

    columns = [
        PATTERN,
        LENGTH,
        time("First token", "first_token_seconds"),
        time("Further token", "token_seconds"),
        number("Throughput", "tokens_per_second", "tokens/s", ".0f"),
        number("KV cache", "kv_cache_bytes", "MB/sequence", ".2f", MEGABYTE),
        number("Memory", "memory_bytes", "MB", ".1f", MEGABYTE),
    ]
    return table_of("How fast the model answers on this device", rows, columns, notes)


def position_table(rows: Sequence[Row]) -> Table:
    """One line a pattern and position: operations of the prefill there, and the tokens that decoding reads."""
    notes = (
        "KV read: tokens of the cache that decoding reads, the mean over layers and KV heads. Both are counted, not "
        "measured.",
    )
    prefill = number("Prefill", "prefill_flops", "GFLOP", ".4g", 1e9)
    columns = [PATTERN, number("Position", "position"), prefill, number("KV read", "kv_tokens_read", "tokens", ".0f")]
    return table_of("Work for the token at each position", rows, columns, notes)
