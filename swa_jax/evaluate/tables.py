"""What `swa-jax evaluate` measured, as tables and as grids for pictures. Rows are those of its results.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

from swa_jax.estimates import in_brackets
from swa_jax.flops import forward_flops

if TYPE_CHECKING:
    from swa_jax.config import ModelConfig
    from swa_jax.evaluate.routing import Routed
    from swa_jax.evaluate.ruler import Cell

Row = Mapping[str, Any]


def ruler_table(rows: Sequence[Row]) -> Table:
    """One line for every pattern, task, length and depth."""
    table = _table("RULER: share of the hidden values that the answers repeat")
    haystacks = dict.fromkeys(row["haystack"] for row in rows)
    table.caption = (
        "95 % interval in brackets (Wilson). Prompts leave room for the answer and are within 1 % below their length.\n"
        f"Haystacks: {'; '.join(haystacks)}."
    )
    if any("in place of essays" in name for name in haystacks):
        table.caption += " RULER's essays are not shipped: name them with --haystack."
    deep = any(row["depth"] is not None for row in rows)
    for title in ("Pattern", "Task"):
        table.add_column(title, no_wrap=True)
    for title in ("Length", *(["Depth"] if deep else []), "Found", "Examples"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        depth = [f"{row['depth']:.0%}"] if deep else []
        found = f"{100 * row['score']:.0f} %{in_brackets(row['interval'], '{:.0f}', 100)}"
        table.add_row(row["name"], row["task"], str(row["length"]), *depth, found, str(row["num_examples"]))
    return table


def ruler_heat(rows: Sequence[Row]) -> tuple[list[list[float]], list[str], list[str]]:
    """Scores for a heat map, with its labels: depths across where they were asked for, else lengths."""
    deep = any(row["depth"] is not None for row in rows)

    def place(row: Row) -> tuple[str, str]:
        name = f"{row['name']}, {row['task']}"
        if deep:
            return f"{name}, {row['length']}", f"{row['depth']:.0%}"
        return name, str(row["length"])

    return _grid([(place(row), row["score"]) for row in rows])


def sweep_table(rows: Sequence[Row]) -> Table:
    """One line a pattern and window, one column a length."""
    table = _table("Perplexity by evaluation window and length")
    extrapolated, blocks = any(row["past_training_length"] for row in rows), rows[0]["num_blocks"]
    table.caption = (
        f"The same {rows[0]['num_tokens']} tokens in every cell; "
        + (
            f"95 % bootstrap interval over {blocks} blocks of them."
            if blocks > 1
            else "too few for an interval."
        )
    ) + ("\n* longer than the context that the model's config names." if extrapolated else "")
    table.add_column("Pattern", no_wrap=True)
    table.add_column("Window", justify="right", no_wrap=True)
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        star = "*" if row["past_training_length"] else ""
        line = cells.setdefault((row["name"], _window(row)), {})
        line[row["length"]] = f"{row['perplexity']:.2f}{star}{in_brackets(row['interval'], '{:.2f}')}"
    for length in dict.fromkeys(row["length"] for row in rows):
        table.add_column(f"Length {length}", justify="right", no_wrap=True)
    for (name, window), line in cells.items():
        table.add_row(name, window, *line.values())
    return table


def sweep_heat(rows: Sequence[Row]) -> tuple[list[list[float]], list[str], list[str]]:
    """Losses in nats a token for a heat map, with its labels: windows down, lengths across."""
    return _grid(
        [((f"{row['name']}, window {_window(row)}", str(row["length"])), row["nll"]) for row in rows]
    )


def routing_row(name: str, cell: Cell, routed: Routed, config: ModelConfig) -> dict[str, Any]:
    """What a routed model does on a text, or on the answers of a (task, length, depth): a row of results.json."""
    task, length, depth = cell
    return {
        "name": name,
        "data": task,
        "length": length,
        "depth": depth,
        "full_ratio": routed.full_ratio.mean,
        "interval": routed.full_ratio.interval,
        "by_layer": [layer.mean for layer in routed.by_layer],
        "by_layer_intervals": [layer.interval for layer in routed.by_layer],
        "keys_read": routed.keys_read.mean,
        "keys_read_interval": routed.keys_read.interval,
        "keys_of_full": routed.keys_of_full,
        "gflops": forward_flops(config, routed.keys_read.mean) / 1e9,
        "gflops_of_full": forward_flops(config, routed.keys_of_full) / 1e9,
        "n": routed.num_units,
    }


def routing_table(rows: Sequence[Row]) -> Table:
    """One line a text or (task, length, depth)."""
    table = _table("Routing: share of the queries that take full attention")
    table.caption = (
        "Of all queries of a text, or of those that predict an answer; mean over layers, 95 % bootstrap interval.\n"
        "Keys read: of the KV cache, a token and layer. GFLOPs: forward, a token, only the branch that is taken.\n"
        "In brackets: full attention's."
    )
    table.add_column("Pattern", no_wrap=True)
    table.add_column("Data", no_wrap=True)
    for title in ("Length", "Depth", "Full attention", "Keys read", "GFLOPs"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["name"],
            row["data"],
            str(row["length"]),
            "" if row["depth"] is None else f"{row['depth']:.0%}",
            f"{100 * row['full_ratio']:.0f} %{in_brackets(row['interval'], '{:.0f}', 100)}",
            f"{row['keys_read']:.0f} ({row['keys_of_full']:.0f})",
            f"{row['gflops']:.3g} ({row['gflops_of_full']:.3g})",
        )
    return table


def harness_table(rows: Sequence[Row]) -> Table:
    """One line a pattern, task and metric."""
    table = _table("lm-evaluation-harness")
    table.caption = (
        "95 % interval over documents in brackets, where the metric is a mean over them (Wilson for right or wrong,\n"
        "bootstrap otherwise)."
    )
    for title in ("Pattern", "Task", "Metric"):
        table.add_column(title, no_wrap=True)
    for title in ("Score", "Documents"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        metric = row["metric"] + ("" if row["filter"] == "none" else f" ({row['filter']})")
        score = f"{row['score']:.4g}{in_brackets(row['interval'], '{:.4g}')}"
        table.add_row(row["name"], row["task"], metric, score, str(row["n"] or ""))
    return table


def questions_table(rows: Sequence[Row]) -> Table:
    """One line a pattern and group of questions."""
    table = _table("Questions about long texts")
    table.caption = (
        "Mean score of 100, 95 % interval over questions (Wilson for right or wrong, bootstrap otherwise).\n"
        "Left out: longer than the context (see --max-length, --cut-middle)."
    )
    for title in ("Pattern", "Benchmark", "Group"):
        table.add_column(title, no_wrap=True)
    for title in ("Score", "Questions", "Left out", "Cut"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        score = "" if row["score"] is None else f"{100 * row['score']:.1f}"
        score += in_brackets(row["interval"], "{:.1f}", 100)
        counts = (str(row[name]) for name in ("num_questions", "num_left_out", "num_cut"))
        table.add_row(row["name"], row["benchmark"], row["group"], score, *counts)
    return table


def _window(row: Row) -> str:
    return "full" if row["window"] is None else str(row["window"])


def _table(title: str) -> Table:
    return Table(title=title, box=box.SIMPLE, title_justify="left", caption_justify="left")


def _grid(cells: Sequence[tuple[tuple[str, str], float]]) -> tuple[list[list[float]], list[str], list[str]]:
    values = dict(cells)
    rows, columns = (list(dict.fromkeys(place[axis] for place, _ in cells)) for axis in (0, 1))
    return [[values[row, column] for column in columns] for row in rows], rows, columns
