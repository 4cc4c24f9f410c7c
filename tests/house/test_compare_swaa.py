"""`python -m scripts.compare swaa`: every row of SWAA's Table 1, its cells in order, and the table of those done."""

import json

import pytest

from scripts.compare import swaa
from scripts.compare.runner import key_of
from swa_jax.base.errors import ConfigError


def test_every_row_of_table_1_is_there_once():
    numbers = [int(number) for row in swaa.ROWS for number in row.numbers.split(", ")]
    assert sorted(numbers) == list(range(35))
    patterns = [row.pattern() for row in swaa.ROWS]
    assert len(set(patterns)) == len(patterns)
    by_number = {number: row.pattern() for row in swaa.ROWS for number in row.numbers.split(", ")}
    assert by_number["0"].full_layers == tuple(range(8))
    assert (by_number["25"].full_layers, by_number["25"].sliding_window) == ((), 32)
    row_34 = by_number["34"]
    assert (row_34.full_layers, row_34.num_sink_tokens, row_34.full_attention_decode) == ((1, 3, 5, 7), 4, True)
    assert by_number["23"].sliding_window == 128
    assert by_number["33"].full_layers == (1, 5)


def test_all_cells_come_once_the_papers_rows_first():
    keys = [(row.numbers, data, seed) for row, data, seed in swaa.keys([0, 1, 2])]
    assert len(set(keys)) == len(keys) == 26 + 11 * 3 * 3 + 15 * 3 * 2
    assert {data for _, data, _ in keys[:26]} == {"none"}
    assert [seed for *_, seed in keys[26:48]] == [0] * 22


def test_the_table_of_what_is_done():
    """Paired differences over the seeds that both have."""

    def line(numbers, data, seed, right, loss):
        losses = {1: [loss / 8] * 4, 2: [loss / 8] * 4, 3: [loss / 8, loss / 8, loss / 8, loss / 8 + 0.6]}
        scores = {f"chains-{hops}": {"right": right, "losses": losses[hops]} for hops in (1, 2, 3)}
        scores["text"] = {"losses": [loss, loss + 0.2]}
        return {"cell": [numbers, data, seed], "scores": scores}

    lines = [
        line("4, 27", "none", 0, [0.0, 0.0, 0.0, 1.0], 3.0),
        line("4, 27", "text", 0, [0.0, 0.0, 0.0, 1.0], 2.0),
        line("4, 27", "replies", 0, [1.0, 0.0, 1.0, 1.0], 2.5),
        line("4, 27", "text", 1, [0.0, 0.0, 0.0, 0.0], 2.0),
    ]
    done = {key_of(*one["cell"]): one for one in lines}
    head, _, *rows = swaa.table(done, [0, 1, 2]).splitlines()
    (row,) = [one for one in rows if one.startswith("| 4, 27 |")]
    titles, cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in (head, row))
    assert cells[:6] == ["4, 27", "32", "none", "0", "yes", "1"]
    assert cells[6:10] == ["25 / 12 / 75 / -"] * 4
    assert titles[9:11] == ["found in all, %", "found in all, %, replies - text"]
    assert cells[10] == "+50 [12, 71]"  # by hand, Newcombe's tenth method
    assert cells[11] == "0.4250 / 0.3000 / 0.3625 / -"
    assert cells[12].startswith("+0.0625 [")
    assert cells[13] == "3.10 / 2.10 / 2.60 / -"
    assert cells[14].startswith("+0.50 [")


def test_seeds_that_agree_are_not_more_prompts():
    row, column = swaa.ROWS[0], swaa.Figure("", ["text"], "losses", 4, True)

    def told(seeds):
        losses = {"replies": [2.0, 2.4, 2.1], "text": [1.5, 1.6, 1.7]}
        done = {
            key_of(row.numbers, data, seed): {"scores": {"text": {"losses": found}}}
            for data, found in losses.items()
            for seed in seeds
        }
        return swaa.difference(done, row, column, seeds)

    assert told([0]) == told([0, 1, 2])


def chain_scores(right):
    found = {f"chains-{hops}": {"right": right, "losses": [0.5] * 4} for hops in (1, 2, 3)}
    return {"scores": found | {"text": {"losses": [2.0, 2.2]}}}


def test_models_stand_beside_each_other_where_both_were_trained():
    none, text, replies = [0.0] * 4, [0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 1.0]

    def model(trained, *rows):
        return {json.dumps([row, data, 0]): chain_scores(found) for row in rows for data, found in trained}

    trained = [("none", none), ("text", text), ("replies", replies)]
    first = model(trained, "4, 27", "33")
    second = model([("none", none), ("text", none), ("replies", text)], "4, 27")
    said, _, head, _, *rows = swaa.table_of_models({"chains": first, "chains-1": second}, [0, 1, 2]).splitlines()
    assert said == "Right answers over all hops, %, of chains, chains-1; seeds: 1, 1."
    (row,) = ([cell.strip() for cell in one.strip("|").split("|")] for one in rows)  # 33: one model only
    assert row[:5] == ["4, 27", "32", "none", "0", "yes"]
    assert (row[5], row[7]) == ("0 / 25 / 75", "0 / 0 / 25")
    assert row[6].startswith("+50 [")
    assert head.count("|") == len(row) + 1


def test_a_folder_keeps_to_one_model(tmp_path):
    def checkpoint(folder, total):
        (folder / "weights").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "manifest.json").write_text(json.dumps({"sha256": {"weights/model.safetensors": total}}))
        return folder

    checkpoint(tmp_path / "model", "ab")
    with pytest.raises(ConfigError, match=r"has cells of another model than .*other: name another --out"):
        swaa.prepare(checkpoint(tmp_path / "other", "cd"), tmp_path, swaa.TINY)
