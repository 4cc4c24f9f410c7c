"""`python -m scripts.compare contrasts`: differences, verdicts and power of a comparison whose scores are known."""

import json

import numpy as np
import pytest

from scripts.compare import contrasts
from scripts.compare.__main__ import main
from swa_jax.base.errors import ConfigError


def exact(right, n=50):
    return [1] * right + [0] * (n - right)


def tables(*folders, measure=contrasts.FOUND, of="seed"):
    return contrasts.tables(*contrasts.read_models(folders, measure), contrasts.costs(folders), measure, of)


@pytest.fixture
def folder(tmp_path):
    """Of 50 prompts: BOSCH 40 and 42, FISHER 20 and 41, interleave 5 and 4, random 50 and 50 as layers by search."""
    by = {"bosch": (40, 42), "fisher": (20, 41), "interleave": (5, 4), "nll": (4, 5), "random": (45, 46)}
    by |= {"bosch-swaps": (50, 50), "nll-greedy": (50, 50)}
    rows = [
        {"name": name, "ratio": 0.5, "seed": seed, "right": exact(right), "comparison": "c"}
        for name, scores in by.items()
        for seed, right in enumerate(scores)
    ]
    full = {
        "name": "full",
        "right": exact(50),
        "needle_accuracy": 1.0,
        "scored_on": {"examples": "e"},
        "comparison": "c",
    }
    (tmp_path / "results.json").write_text(json.dumps({"rows": [full, *rows]}))
    return tmp_path


def test_differences_and_verdicts(folder):
    text = tables(folder)
    rows = {
        tuple(cells[1].split(" above ")): cells[2:]
        for line in text.splitlines()
        if " above " in line
        for cells in [[cell.strip() for cell in line.strip("| ").split("|")]]
    }
    assert "`full`: 100" in text
    assert rows["bosch", "interleave"][1].startswith("+73 [")
    assert rows["bosch", "interleave"][2] == "+70, +76"
    assert rows["bosch", "interleave"][-1] == "reproduced"
    assert rows["bosch", "fisher"][-1] == "in 2 of 2 seeds"  # in the second by less than its interval
    assert rows["bosch", "random"][-1] == "the other way"
    assert rows["nll", "interleave"][-1] == "a tie"
    assert rows["bosch-swaps", "nll-greedy"][-1] == "both at the ceiling"
    assert float(rows["bosch-swaps", "nll-greedy"][-2]) > 0  # equal scores do not claim endless power
    assert ("bosch", "razor") not in rows


def test_losses_and_costs(tmp_path):
    """Losses 0.3 and 0.5 apart, the same in every prompt but for noise that both share; two seeds of two costs."""
    noise, rows = np.random.default_rng(0).random(40), []
    for name, loss, flops in (("kl", 0.3, 4e12), ("razor", 0.8, 1e12), ("nll-heads", 0.3, 2e12)):
        for seed in (0, 1):
            cost = {"flops": flops * (1 + seed), "seconds": 10 * (1 + seed)}
            losses = (noise + loss + 0.1 * seed).tolist()
            pattern = {"provenance": cost}
            rows.append(
                {"name": name, "ratio": 0.5, "seed": seed, "losses": losses, "comparison": "c", "pattern": pattern}
            )
    full = {"name": "full", "losses": noise.tolist(), "scored_on": {"examples": "e"}, "comparison": "c"}
    (tmp_path / "results.json").write_text(json.dumps({"rows": [full, *rows]}))
    text = tables(tmp_path, measure=contrasts.LOSS)
    assert f"`full`: {noise.mean():.2f}." in text
    assert f": {noise.mean() + 0.3:.2f}, {noise.mean() + 0.4:.2f} | 6 TFLOP, 15 s |" in text
    assert "| kl above razor | 50 % | +0.50 [0.50, 0.50] | +0.50, +0.50 |" in text
    assert "| 0.00 | reproduced |" in text
    assert "a tie |" in next(line for line in text.splitlines() if "nll-heads above kl" in line)


def test_of_several_models_each_has_one_seed(folder, tmp_path_factory):
    content = json.loads((folder / "results.json").read_text())
    one, other = (tmp_path_factory.mktemp(name) for name in ("one", "other"))
    for seed, path in enumerate((one, other)):
        rows = [row for row in content["rows"] if row.get("seed", seed) == seed]
        (path / "results.json").write_text(json.dumps({"rows": rows}))
    assert tables(one, other, of="model") == tables(folder, of="model").replace("`full`: 100", "`full`: 100, 100")
    with pytest.raises(ConfigError, match="has 2 seeds"):
        tables(one, folder)
    (other / "results.json").write_text(json.dumps({"rows": [rows[0] | {"scored_on": {"examples": "f"}}, *rows[1:]]}))
    with pytest.raises(ConfigError, match="different prompts"):
        tables(one, other)
    earlier = [row | {"comparison": "earlier", "right": [0] * len(row["right"])} for row in rows]
    (other / "results.json").write_text(json.dumps({"rows": [*earlier, *rows]}))
    assert tables(one, other, of="model") == tables(folder, of="model").replace("`full`: 100", "`full`: 100, 100")
    (other / "results.json").write_text(json.dumps({"rows": [row for row in rows if "ratio" not in row]}))
    with pytest.raises(ConfigError, match="no choice of a method"):
        tables(other)


def test_a_choice_is_not_inferior_if_its_whole_interval_is_above_the_margin(tmp_path):
    def row(name, right, n, **more):
        common = {"name": name, "right": exact(right, n), "comparison": "c", "needle_accuracy": right / n}
        return common | {"kv_cache_bytes": 8 if name == "full" else 2} | more

    seen_from = {}
    for n, told in ((50, "cannot be told"), (1000, "not inferior")):  # fifty prompts do not tell a point
        chosen = [
            row(name, right, n, ratio=0.75, seed=seed)
            for name, right in (("kl", n), ("razor", n // 2))
            for seed in (0, 1)
        ]
        file = tmp_path / f"results-{n}.json"
        file.write_text(json.dumps({"rows": [row("full", n, n), *chosen]}))
        lines = contrasts.against_full(file, 1).splitlines()
        kl, razor = ([cell.strip() for cell in line.strip("| ").split("|")] for line in lines[-2:])
        assert (kl[0], kl[2], kl[-1]) == ("kl", "25.0", told)
        assert (razor[0], razor[-1]) == ("razor", "inferior")
        assert kl[3].startswith("+0.0 [")
        assert razor[3].startswith("-50.0 [")
        seen_from[n] = float(razor[-2])
    assert seen_from[50] > 2 * seen_from[1000]  # power grows with prompts


def test_the_tables_go_into_a_document(folder):
    document = folder / "page.md"
    document.write_text(f"before\n<!-- contrasts: {folder.name} -->\nold\n<!-- end of contrasts -->\nafter\n")
    main(["contrasts", str(folder), "--docs", str(document), "--out", str(folder / "out")])
    text = document.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "Made at revision" in text
    document.write_text("no marks")
    with pytest.raises(SystemExit, match="has no"):
        main(["contrasts", str(folder), "--docs", str(document), "--out", str(folder / "out")])
    assert document.read_text() == "no marks"
