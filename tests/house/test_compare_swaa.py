"""scripts/compare_swaa.py: every row of SWAA's Table 1, its cells in order, and the table of those that are done."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield importlib.import_module("compare_swaa")
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def test_every_row_of_table_1_is_there_once(script):
    numbers = [int(number) for row in script.ROWS for number in row.numbers.split(", ")]
    assert sorted(numbers) == list(range(35))
    patterns = [row.pattern() for row in script.ROWS]
    assert len(set(patterns)) == len(patterns)
    by_number = {number: row.pattern() for row in script.ROWS for number in row.numbers.split(", ")}
    assert by_number["0"].full_layers == tuple(range(8))
    assert (by_number["25"].full_layers, by_number["25"].sliding_window) == ((), 32)
    row_34 = by_number["34"]
    assert (row_34.full_layers, row_34.num_sink_tokens, row_34.full_attention_decode) == (
        (1, 3, 5, 7),
        4,
        True,
    )
    assert by_number["23"].sliding_window == 128
    assert by_number["33"].full_layers == (1, 5)


def test_all_cells_come_once_the_papers_rows_first(script):
    cells = list(script.cells([0, 1, 2]))
    keys = [json.dumps(cell.key) for cell in cells]
    assert len(set(keys)) == len(keys) == 26 + 11 * 3 * 3 + 15 * 3 * 2
    assert {cell.data for cell in cells[:26]} == {"none"}
    assert [cell.seed for cell in cells[26:48]] == [0] * 22


def test_the_table_of_what_is_done(script, tmp_path):
    """Paired differences over the seeds that both have; a cell that was cut off is not there."""

    def line(numbers, data, seed, right, loss):
        losses = {1: [loss / 8] * 4, 4: [loss / 8, loss / 8, loss / 8, loss / 8 + 0.8]}
        scores = {f"needles-{keys}": {"right": right, "losses": losses[keys]} for keys in (1, 4)}
        scores["text"] = {"losses": [loss, loss + 0.2]}
        return {"cell": [numbers, data, seed], "size": dataclasses.asdict(script.Size()), "scores": scores}

    lines = [
        line("4, 27", "none", 0, [0.0, 0.0, 0.0, 1.0], 3.0),
        line("4, 27", "text", 0, [0.0, 0.0, 1.0, 1.0], 2.0),
        line("4, 27", "replies", 0, [1.0, 0.0, 1.0, 1.0], 2.5),
        line("4, 27", "text", 1, [0.0, 0.0, 0.0, 0.0], 2.0),
    ]
    file = tmp_path / "cells.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in lines) + '{"cell": ["4, 27", "repl')
    done = script.read_cells(tmp_path, script.Size())
    assert len(done) == 4
    assert len(file.read_text().splitlines()) == 4
    (row,) = [one for one in script.table(done, [0, 1, 2]).splitlines() if one.startswith("| 4, 27 |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:6] == ["4, 27", "32", "none", "0", "yes", "1"]
    assert cells[6:9] == ["25 / 25 / 75 / -", "25 / 25 / 75 / -", "0.4750 / 0.3500 / 0.4125 / -"]
    assert cells[9].startswith("+0.0625 [")
    assert cells[10] == "3.10 / 2.10 / 2.60 / -"
    assert cells[11].startswith("+0.50 [")
    page = tmp_path / "page.md"
    page.write_text(
        "before\n<!-- swaa: made by scripts/compare_swaa.py -->\nold\n<!-- end of swaa -->\nafter\n"
    )
    script.put_into(page, "NEW")
    assert page.read_text() == (
        "before\n<!-- swaa: made by scripts/compare_swaa.py -->\n\nNEW\n\n<!-- end of swaa -->\nafter\n"
    )
