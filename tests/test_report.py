"""The pictures are written whole, and the table says what a newcomer needs."""

import io

import numpy as np
import pytest
from rich.console import Console

from swa_jax.evaluate import Estimate
from swa_jax.report import (
    _apart,
    _clusters,
    accuracy_memory_chart,
    layer_ratio_map,
    layer_scores_chart,
    loss_heat_map,
    needle_heat_map,
    pattern_table,
    routed_cpt_chart,
    training_curves,
)

PNG = b"\x89PNG\r\n\x1a\n"


def row(name, layers, accuracy, megabytes):
    return {
        "name": name,
        "full_layers": layers,
        "num_layers": 4,
        "needle_accuracy": accuracy,
        "needle_interval": [max(0, accuracy - 0.1), min(1, accuracy + 0.1)],
        "answer_nll": 1.234,
        "kv_cache_bytes": int(megabytes * 2**20),
        "prefill_seconds": 0.0305,
        "decode_tokens_per_second": 812.4,
    }


ROWS = [row("full", [0, 1, 2, 3], 1.0, 4), row("window", [], 0.02, 0.5), row("window+fa-decode", [], 0.5, 4)]


def test_every_picture_is_a_whole_png_and_nothing_else_is_left(tmp_path):
    needle_heat_map([[1.0, 0.0], [0.5, np.nan]], ["full", "window"], ["10 %", "50 %"], tmp_path / "a.png")
    layer_scores_chart(
        [Estimate(0.5, 0.4, 0.7), Estimate(-0.1, -0.2, 0.0)], [0], tmp_path / "b.png", title="Layers"
    )
    accuracy_memory_chart(ROWS, tmp_path / "c.png")
    steps = [{"step": i, "loss": 2.0 - i, "full_attention_ratio": 0.5} for i in (1, 2)]
    routed_cpt_chart(steps, tmp_path / "d.png")
    loss_heat_map(
        [[3.0, 14.3], [3.1, np.nan]], ["softmax", "sigmoid"], ["32", "256"], tmp_path / "e.png", title="T"
    )
    training_curves(
        {"one": [[3.0, 2.0], [3.1, 2.2]], "two": [[3.0]]}, 10, tmp_path / "f.png", title="T", ylabel="Loss"
    )
    layer_ratio_map([[0.5, 0.1], [1.0, 0.9]], 10, tmp_path / "g.png", title="T")
    assert sorted(file.name for file in tmp_path.iterdir()) == [f"{letter}.png" for letter in "abcdefg"]
    for file in tmp_path.iterdir():
        assert file.read_bytes().startswith(PNG)


def test_heat_map_refuses_labels_that_do_not_fit(tmp_path):
    with pytest.raises(ValueError, match="there are 1 and 2 labels"):
        needle_heat_map([[1.0, 0.0], [0.5, 0.5]], ["full"], ["10 %", "50 %"], tmp_path / "a.png")


def test_table_names_units_and_how_to_read_it():
    console = Console(width=125, record=True, file=io.StringIO())
    console.print(pattern_table(ROWS))
    text = console.export_text()
    for part in ("nats/token", "MB/sequence", "ms/prompt", "tokens/s", "Read it against 'full'"):
        assert part in text
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "all" in lines["full"]
    assert "100 % [90, 100]" in lines["full"]
    assert "none" in lines["window"]
    assert lines["window"].split()[-4:] == ["1.23", "0.50", "30", "812"]


def test_labels_are_moved_apart_as_little_as_needed():
    np.testing.assert_allclose(_apart([1, 50, 99], gap=5, low=0, high=100), [1, 50, 99])
    moved = _apart([98, 99, 100], gap=5, low=0, high=100)
    assert (np.diff(moved) >= 5).all()
    assert moved.max() <= 100
    groups = _clusters(np.array([4.0, 0.1, 0.2, 3.95, 2.0]), width=0.3)
    assert [group.tolist() for group in groups] == [[1, 2], [4], [3, 0]]
