"""Tables: as wide as the terminal, nothing cut off at any width, and a mean alone where there is no interval."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from rich.console import Console

from swa_jax.report.bench_tables import attention_table, cycles_table, generation_table, source_table
from swa_jax.report.evaluation_tables import (
    efficiency_table,
    harness_table,
    position_table,
    questions_table,
    routing_table,
    ruler_table,
    sweep_table,
)
from swa_jax.report.tables import Column, Table, compare_table, pattern_table, table_console

PRINTED = Path(__file__).with_name("tables.txt")
INTERVALS = ([0.9, 1.0], None, [None, None])


def pattern(name, layers, interval):
    return {
        "name": name, "full_layers": layers, "num_layers": 4, "needle_accuracy": 0.97, "needle_interval": interval,
        "answer_nll": 1.234, "kv_cache_bytes": 2**19, "prefill_seconds": 0.0305, "decode_tokens_per_second": 812.4,
    }  # fmt: skip


NAMES = ("full", "interleave-1-in-4+fa-decode", "/a/folder/with/a/rather/long/name/nll-1-in-4.json")
PATTERNS = [
    pattern(name, layers, interval)
    for name, layers, interval in zip(NAMES, ([0, 1, 2, 3], [], [1, 2]), INTERVALS, strict=True)
]


def named(**same):
    """Three rows, which differ in the pattern's name and the interval."""
    return [same | {"name": name, "interval": interval} for name, interval in zip(NAMES, INTERVALS, strict=True)]


COMPARED = [
    {
        "name": name,
        "ratio": ratio,
        "needle_accuracy": 0.97,
        "needle_interval": interval,
        "by_seed": [1.0, 0.5, 1.0],
        "answer_nll": 0.5,
        "answer_nll_interval": interval,
        "kv_cache_bytes": 2**20,
        "tokens": 150_528.0,
        "flops": 4.56e13,
        "seconds": 61.4,
    }
    for name, ratio, interval in zip(NAMES, (None, 0.5, 0.75), INTERVALS, strict=True)
]
COMPARED[2] |= {"against": "bosch-single", "gap": [-0.3, -0.4, -0.2], "loss_gap": [0.3, 0.2, 0.4]}
RULER = named(
    task="niah_multiquery", length=16384, depth=0.5, score=0.97, num_examples=100,
    data="RULER's own", difference=-0.03, difference_interval=[-0.11, 0.05],
)  # fmt: skip
SWEEP = [
    {
        "name": name,
        "window": window,
        "length": length,
        "perplexity": 0.97,
        "interval": interval,
        "past_training_length": length > 1000,
        "num_tokens": 4096,
        "num_blocks": 32,
    }
    for name, interval in zip(NAMES, INTERVALS, strict=True)
    for window in (1024, None)
    for length in (128, 1024, 4096, 16384, 65536)
]
ROUTING = named(
    data="niah_single_1", length=4096, depth=None, full_ratio=0.97, keys_read=300.4, keys_of_full=2048.5,
    gflops=0.0123, gflops_of_full=0.5,
)  # fmt: skip
HARNESS = named(task="hellaswag", metric="acc_norm", filter="strict-match", score=0.97, n=10042)
QUESTIONS = named(benchmark="LongBench", group="multi_news", score=0.97, num_questions=200, num_left_out=3, num_cut=0)
QUESTIONS[2]["score"] = None
CYCLES = {
    "function": "window_forward",
    "chip": "v6e",
    "settings": {"T": 8192, "window": 1024},
    "cycles": None,
    "cycles_per_1024_rows_and_head": None,
    "milliseconds": None,
    "temp_bytes": 512,
    "notes": ["a remark"],
    "ops": [{"name": f"window_forward.{i}", "cycles": 10_000, "source": "simulated"} for i in range(9)]
    + [{"name": "copy", "cycles": None, "source": "not simulated, for a long reason " * 4}],
}
ATTENTION = {
    "results": [
        {"name": "ours", "seconds": 0.002, "ratio": 1.0, "low": 1.0, "high": 1.0, "missing": None},
        dict.fromkeys(("seconds", "ratio", "low", "high"))
        | {"name": "flex_attention", "missing": "Error: " + "no " * 90},
    ]
}
GENERATION = [
    {"ratio": 0.75, "windowed_heads": 24}
    | {
        f"{key}{end}": 1234567.0 if not end else 1.5
        for key in ("kv_cache_bytes", "prefill_tokens_per_second", "decode_tokens_per_second")
        for end in ("", "_ratio")
    }
]
SOURCES = [
    {"name": "text: " + ", ".join(f"corpus/part-{i}.jsonl" for i in range(9)), "documents": None, "tokens": 12_345_678,
     "share": 0.5, "padding": 0.01, "held_out_tokens": 1000, "left_out": 0}
]  # fmt: skip

EFFICIENCY = [
    {
        "name": name, "length": 4096, "new_tokens": 32, "requests": 2, "first_token_seconds": first,
        "token_seconds": 0.01, "tokens_per_second": 812.0, "kv_cache_bytes": 2**21, "token_seconds_all": [0.01] * 5,
        "memory_bytes": 2**33,
    }
    for name, first in (("full", 0.4), ("interleave-1-in-4", 0.2))
]  # fmt: skip
POSITIONS = [
    {"name": name, "position": 4**i, "prefill_flops": 1.234e12, "kv_tokens_read": 4.0**i}
    for name in ("full", "interleave-1-in-4")
    for i in range(9)
]
TABLES = {
    "patterns": pattern_table(PATTERNS),
    "compared": compare_table(COMPARED, 48),
    "ruler": ruler_table(RULER),
    "sweep": sweep_table(SWEEP),
    "routing": routing_table(ROUTING),
    "harness": harness_table(HARNESS),
    "questions": questions_table(QUESTIONS),
    "efficiency": efficiency_table(EFFICIENCY),
    "positions": position_table(POSITIONS),
    "cycles": cycles_table(CYCLES, 4),
    "attention": attention_table(ATTENTION, "forward  T=8192  window=1024, on a device"),
    "generation": generation_table(GENERATION, "4 prompts"),
    "sources": source_table(SOURCES, "stage 0"),
}


def printed(table, width):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table)
    return console.export_text()


@pytest.mark.parametrize("width", [40, 80, 125, 200])
@pytest.mark.parametrize("name", TABLES)
def test_nothing_is_wider_than_the_terminal_and_nothing_cut_off(name, width):
    table = TABLES[name]
    text = printed(table, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    # Wrapping may spread a cell over lines; each of its characters is there all the same.
    letters = {c: text.count(c) for c in set(text)}
    for c in set("".join("".join(row) for row in table.rows)) - set(" \n"):
        assert letters.get(c, 0) >= sum("".join(row).count(c) for row in table.rows), c


def all_tables() -> str:
    lines = "\n".join(printed(table, 125) for table in TABLES.values()).splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


def test_titles_units_and_numbers_stand_where_a_reader_looked_for_them_before():
    """Is the change meant? `PYTHONPATH=tests python -m report.test_tables` writes the file again: read what differs."""
    assert all_tables() == PRINTED.read_text()


def test_each_width_has_its_form():
    rows = {width: printed(TABLES["patterns"], width) for width in (125, 80, 40)}
    assert re.search(r"^full +all +97 % \[90, 100\] +1\.23 +0\.50 +30 +812", rows[125], re.M)
    assert re.search(r"^full +all +97 % +1\.23 +0\.50 +30 +812 *\n +\[90, 100\]", rows[80], re.M)
    assert "full, all\n  Needles found  97 % [90, 100]\n  Answer loss    1.23 nats/token\n" in rows[40]
    for unit in ("nats/token", "MB/sequence", "ms/prompt", "tokens/s"):
        assert all(unit in " ".join(text.split()) for text in rows.values())
    assert "Read it against 'full'" in rows[125]


def test_names_are_wrapped_where_they_can_be_read():
    table = Table("T", [Column("Pattern", text=True), Column("Found")])
    table.add_row("interleave-1-in-4+fa-decode", "97 %\n[90, 100]")
    lines = [line.split("  ")[0].strip() for line in printed(table, 30).splitlines()]
    assert "interleave-1-in-4+" in lines
    assert "fa-decode" in lines


@pytest.mark.parametrize("name", ["patterns", "compared", "ruler", "routing"])
def test_a_mean_without_an_interval_stands_alone(name):
    for row in printed(TABLES[name], 200).splitlines():
        if "97" in row and not row.startswith("full "):
            # RULER's table has all patterns in one line, of which the first has an interval.
            assert len(re.findall(r"97(?: %)? \[", row)) == (name == "ruler"), row
    assert "None" not in printed(TABLES[name], 200)


def test_notes_say_when_there_is_nothing_to_say():
    assert "too few for an interval" in " ".join(sweep_table([SWEEP[0] | {"num_blocks": 1}]).notes)
    assert "32 blocks" in " ".join(TABLES["sweep"].notes)
    assert "Windows of 48 keys" in " ".join(TABLES["compared"].notes)
    assert "keys" not in " ".join(compare_table(COMPARED, None).notes)


def test_a_total_with_a_gap_is_marked():
    total, *ops = TABLES["cycles"].rows
    assert total[1] == "> 90,000"
    assert total[3] == "no figure"
    assert [row[0].strip() for row in ops] == [*(f"window_forward.{i}" for i in range(4)), "6 more"]
    assert ops[-1][1] == "50,000"


def test_a_row_has_as_many_cells_as_there_are_columns():
    with pytest.raises(ValueError, match="2 cells, but there are 1 columns"):
        Table("T", [Column("a")]).add_row("1", "2")


# ---- the console ----


def test_without_a_terminal_tables_have_125_columns(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert table_console().width == 125
    monkeypatch.setenv("COLUMNS", "90")
    assert table_console().width == 90


def test_a_terminal_is_filled_and_no_more():
    """In a pseudo-terminal of this width, which is the real thing."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    code = "from swa_jax.report.tables import table_console as t; print(t().width)"
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    subprocess.run(
        [sys.executable, "-c", code], stdin=follower, stdout=follower, stderr=follower, check=True, env=environment
    )
    os.close(follower)
    assert os.read(leader, 1000).decode().split() == ["80"]
    os.close(leader)


if __name__ == "__main__":
    PRINTED.write_text(all_tables())
