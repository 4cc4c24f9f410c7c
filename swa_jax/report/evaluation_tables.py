"""Tables of what `swa-jax evaluate` measured. Rows are those of its results.json."""

from __future__ import annotations

from collections.abc import Sequence

from swa_jax.report.numbers import MEGABYTE, Row, with_interval
from swa_jax.report.tables import Column, Table, percent


def ruler_table(rows: Sequence[Row]) -> Table:
    """One line for every pattern, task, length and depth."""
    deep = any(row["depth"] is not None for row in rows)
    questions = any(row["task"].startswith("qa") for row in rows)
    haystacks = f"Haystacks: {'; '.join(dict.fromkeys(row['haystack'] for row in rows))}."
    if "in place of essays" in haystacks:
        haystacks += " RULER's essays are not shipped: name them with --haystack."
    table = Table(
        "RULER: share of what is asked for that the answers have",
        [
            Column("Pattern", text=True),
            Column("Task", text=True),
            Column("Length"),
            *([Column("Depth")] if deep else []),
            Column("Found"),
            Column("Examples"),
        ],
        (
            "95 % interval in brackets (Wilson).",
            "Prompts leave room for the answer and are within 1 % below their length.",
            *(["qa: 100 % where one of the right answers is there."] if questions else []),
            haystacks,
        ),
    )
    for row in rows:
        depth = ["" if row["depth"] is None else f"{row['depth']:.0%}"] if deep else []
        found = with_interval(row["score"], row.get("interval"), percent, " %")
        table.add_row(row["name"], row["task"], str(row["length"]), *depth, found, str(row["num_examples"]))
    return table


def chain_table(rows: Sequence[Row]) -> Table:
    """One line for every pattern, number of hops and of rivals, length and depth."""
    deep = any(row["depth"] is not None for row in rows)
    asked = "the sum of two numbers" if rows[0]["sums"] else "the number at a chain's end"
    table = Table(
        f"Chains: questions for {asked} answered, %",
        [
            Column("Pattern", text=True),
            Column("Hops"),
            Column("Rivals"),
            Column("Length"),
            *([Column("Depth")] if deep else []),
            Column("Right"),
            Column("Examples"),
        ],
        (
            "95 % interval in brackets (Wilson). Teacher-forced: the number is the likeliest token.",
            f"The statements of a chain stand at least {rows[0]['gap']} tokens apart.",
        ),
    )
    for row in rows:
        depth = ["" if row["depth"] is None else f"{row['depth']:.0%}"] if deep else []
        right = with_interval(row["score"], row["interval"], percent, " %")
        cells = [str(row[key]) for key in ("hops", "rivals", "length")]
        table.add_row(row["name"], *cells, *depth, right, str(row["n"]))
    return table


def sweep_table(rows: Sequence[Row]) -> Table:
    """One line a pattern and window, one column a length."""
    lengths = list(dict.fromkeys(row["length"] for row in rows))
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
    table = Table(
        "Perplexity by evaluation window and length",
        [Column("Pattern", text=True), Column("Window"), *(Column(f"Length {length}") for length in lengths)],
        notes,
    )
    for (name, window), line in cells.items():
        table.add_row(name, window, *(line.get(length, "") for length in lengths))
    return table


def routing_table(rows: Sequence[Row]) -> Table:
    """One line a text or (task, length, depth)."""
    table = Table(
        "Routing: share of the queries that take full attention",
        [
            Column("Pattern", text=True),
            Column("Data", text=True),
            *(Column(title) for title in ("Length", "Depth", "Full attention", "Keys read", "GFLOPs")),
        ],
        (
            "Share of all queries of a text, or of those that predict an answer: mean over layers, 95 % interval.",
            "Keys read: of the KV cache, a token and layer. GFLOPs: forward, a token, only the branch that is taken.",
            "In round brackets: full attention's.",
        ),
    )
    for row in rows:
        table.add_row(
            row["name"],
            row["data"],
            str(row["length"]),
            "" if row["depth"] is None else f"{row['depth']:.0%}",
            with_interval(row["full_ratio"], row.get("interval"), percent, " %"),
            f"{row['keys_read']:.0f}\n({row['keys_of_full']:.0f})",
            f"{row['gflops']:.3g}\n({row['gflops_of_full']:.3g})",
        )
    return table


def harness_table(rows: Sequence[Row]) -> Table:
    """One line a pattern, task and metric."""
    table = Table(
        "lm-evaluation-harness",
        [*(Column(title, text=True) for title in ("Pattern", "Task", "Metric")), Column("Score"), Column("Documents")],
        (
            "95 % interval over documents in brackets, where the metric is a mean over them (Wilson for right or "
            "wrong, bootstrap otherwise).",
        ),
    )
    for row in rows:
        metric = row["metric"] + ("" if row["filter"] == "none" else f" ({row['filter']})")
        score = with_interval(row["score"], row.get("interval"), "{:.4g}".format)
        table.add_row(row["name"], row["task"], metric, score, str(row["n"] or ""))
    return table


def questions_table(rows: Sequence[Row]) -> Table:
    """One line a pattern and group of questions."""
    table = Table(
        "Questions",
        [
            *(Column(title, text=True) for title in ("Pattern", "Benchmark", "Group")),
            *(Column(title) for title in ("Score", "Questions", "Left out", "Cut")),
        ],
        (
            "Mean score of 100, 95 % interval over questions (Wilson for right or wrong, bootstrap otherwise).",
            "Left out: longer than the context (see --max-length, --cut-middle).",
        ),
    )
    for row in rows:
        score = with_interval(row["score"], row.get("interval"), lambda value: f"{100 * value:.1f}")
        counts = (str(row[name]) for name in ("num_questions", "num_left_out", "num_cut"))
        table.add_row(row["name"], row["benchmark"], row["group"], score, *counts)
    return table


def efficiency_table(rows: Sequence[Row]) -> Table:
    """One line a pattern and length; in brackets how many times faster than the first pattern at that length."""
    table = Table(
        "How fast the model answers on this device",
        [
            Column("Pattern", text=True),
            Column("Length"),
            Column("First token", "ms"),
            Column("Further token", "ms"),
            Column("Throughput", "tokens/s"),
            Column("KV cache", "MB/sequence"),
            Column("Memory", "MB"),
        ],
        (
            f"{rows[0]['requests']} prompts at a time, {rows[0]['new_tokens']} tokens of answer; medians over "
            f"{len(rows[0]['token_seconds_all'])} rounds, the patterns in turn.",
            f"In brackets: times faster than {rows[0]['name']}. Memory: the weights and all caches.",
        ),
    )
    first = {row["length"]: row for row in reversed(rows)}
    for row in rows:
        cells = []
        for key in ("first_token_seconds", "token_seconds"):
            faster = first[row["length"]][key] / row[key]
            cells.append(f"{1000 * row[key]:.3g}\n({faster:.2f})")
        rate, memory = f"{row['tokens_per_second']:.0f}", f"{row['kv_cache_bytes'] / MEGABYTE:.2f}"
        whole = f"{row['memory_bytes'] / MEGABYTE:.1f}"
        table.add_row(row["name"], str(row["length"]), *cells, rate, memory, whole)
    return table


def position_table(rows: Sequence[Row]) -> Table:
    """One line a pattern and position: operations of the prefill there, and the tokens that decoding reads."""
    table = Table(
        "Work for the token at each position",
        [Column("Pattern", text=True), Column("Position"), Column("Prefill", "GFLOP"), Column("KV read", "tokens")],
        (
            "KV read: tokens of the cache that decoding reads, the mean over layers and KV heads. Both are counted, "
            "not measured.",
        ),
    )
    for row in rows:
        table.add_row(
            row["name"], str(row["position"]), f"{row['prefill_flops'] / 1e9:.4g}", f"{row['kv_tokens_read']:.0f}"
        )
    return table
