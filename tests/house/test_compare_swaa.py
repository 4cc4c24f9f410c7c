"""scripts/compare_swaa.py: every row of SWAA's Table 1, its cells in order, and the table of those that are done."""

import dataclasses
import json

import pytest

from swa_jax.errors import ConfigError

SCRIPT = "compare_swaa"


def test_every_row_of_table_1_is_there_once(script):
    numbers = [int(number) for row in script.ROWS for number in row.numbers.split(", ")]
    assert sorted(numbers) == list(range(35))
    patterns = [row.pattern() for row in script.ROWS]
    assert len(set(patterns)) == len(patterns)
    by_number = {number: row.pattern() for row in script.ROWS for number in row.numbers.split(", ")}
    assert by_number["0"].full_layers == tuple(range(8))
    assert (by_number["25"].full_layers, by_number["25"].sliding_window) == ((), 32)
    row_34 = by_number["34"]
    assert (row_34.full_layers, row_34.num_sink_tokens, row_34.full_attention_decode) == ((1, 3, 5, 7), 4, True)
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
    (row,) = [
        one for one in script.table("recall", script.Done(done, [0, 1, 2])).splitlines() if one.startswith("| 4, 27 |")
    ]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:6] == ["4, 27", "32", "none", "0", "yes", "1"]
    assert cells[6:9] == ["25 / 25 / 75 / -", "25 / 25 / 75 / -", "0.4750 / 0.3500 / 0.4125 / -"]
    assert cells[9].startswith("+0.0625 [")
    assert cells[10] == "3.10 / 2.10 / 2.60 / -"
    assert cells[11].startswith("+0.50 [")


def chain_scores(right):
    found = {f"chains-{hops}": {"right": right, "losses": [0.5] * 4} for hops in (1, 2, 3)}
    return found | {"text": {"losses": [2.0, 2.2]}}


def test_of_chains_all_that_is_found_is_compared_as_well(script):
    done = {
        json.dumps(["4, 27", "text", 0]): chain_scores([0.0, 0.0, 0.0, 1.0]),
        json.dumps(["4, 27", "replies", 0]): chain_scores([1.0, 0.0, 1.0, 1.0]),
    }
    head, _, *rows = script.table("chains", script.Done(done, [0])).splitlines()
    (row,) = [one for one in rows if one.startswith("| 4, 27 |")]
    by_title = dict(zip(*([cell.strip() for cell in line.strip("|").split("|")] for line in (head, row)), strict=True))
    assert by_title["2 hops, %"] == by_title["found in all, %"] == "- / 25 / 75 / -"
    assert by_title["found in all, %, replies - text"] == "+50 [12, 71]"  # by hand, Newcombe's tenth method


def test_models_stand_beside_each_other_where_both_were_trained(script):
    none, text, replies = [0.0] * 4, [0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 1.0]

    def model(trained, *rows):
        cells = {json.dumps([row, data, 0]): chain_scores(found) for row in rows for data, found in trained}
        return script.Done(cells, [0, 1, 2])

    trained = [("none", none), ("text", text), ("replies", replies)]
    first = model(trained, "4, 27", "33")
    second = model([("none", none), ("text", none), ("replies", text)], "4, 27")
    said, _, head, _, *rows = script.table_of_models({"chains": first, "chains-1": second}).splitlines()
    assert said == "Right answers over all hops, %, of chains, chains-1; seeds: 1, 1."
    (row,) = ([cell.strip() for cell in one.strip("|").split("|")] for one in rows)  # 33: one model only
    assert row[:5] == ["4, 27", "32", "none", "0", "yes"]
    assert (row[5], row[7]) == ("0 / 25 / 75", "0 / 0 / 25")
    assert row[6].startswith("+50 [")
    assert head.count("|") == len(row) + 1


def test_a_folder_keeps_to_one_model(script, tmp_path):
    def checkpoint(folder, total):
        (folder / "weights").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "manifest.json").write_text(json.dumps({"sha256": {"weights/model.safetensors": total}}))
        return folder

    checkpoint(tmp_path / "model", "ab")
    with pytest.raises(ConfigError, match=r"has cells of another model than .*other: name another --out"):
        script.prepare("chains", checkpoint(tmp_path / "other", "cd"), tmp_path, script.TINY)


@pytest.mark.parametrize("name", ["recall", "chains"])
def test_a_table_goes_into_its_own_place(script, tmp_path, name):
    marks = {one: f"<!-- swaa: made by scripts/compare_swaa.py --model {one} -->" for one in ("recall", "chains")}
    end = "<!-- end of swaa -->"
    page = tmp_path / "page.md"
    page.write_text("".join(f"before\n{mark}\nold\n{end}\n" for mark in marks.values()))
    script.put_into(page, f"--model {name}", "NEW")
    texts = {one: "\nNEW\n" if one == name else "old" for one in marks}
    assert page.read_text() == "".join(f"before\n{mark}\n{texts[one]}\n{end}\n" for one, mark in marks.items())
