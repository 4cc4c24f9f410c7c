"""The pictures are written whole, and the table says what a newcomer needs."""

import io

import numpy as np
import pytest
from rich.console import Console

from swa_jax.evaluate import Estimate
from swa_jax.report import (
    _apart,
    _clusters,
    _short,
    accuracy_memory_chart,
    frontier_chart,
    head_map,
    layer_ratio_map,
    layer_scores_chart,
    loss_heat_map,
    needle_heat_map,
    pattern_table,
    routed_cpt_chart,
    routing_chart,
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


def test_pattern_files_are_named_without_folder_unless_two_would_be_the_same():
    assert _short(["full", "/a/b, c/nll.json", "/a/x.json, niah, 4096", "layers:2,3"]) == [
        "full",
        "nll",
        "x, niah, 4096",
        "layers:2,3",
    ]
    assert _short(["nll", "/a/nll.json", "/a/nll.json"]) == ["nll", "nll.json", "nll.json"]
    assert _short(["/a/nll.json", "/b/nll.json"]) == ["/a/nll.json", "/b/nll.json"]


@pytest.fixture
def saved(monkeypatch):
    """The figures that are written, to look into."""
    figures = []
    monkeypatch.setattr("swa_jax.report._save", lambda figure, file: figures.append(figure))
    return figures


@pytest.mark.parametrize(
    ("larger_is_local", "says"), [(True, "large: windowed"), (False, "large: stays full")]
)
def test_head_map_says_which_end_of_the_scores_is_windowed(saved, larger_is_local, says):
    scores = [[0.1, 0.9], [0.5, 0.2]]
    head_map(np.eye(2), "a.png", title="T", scores=scores, larger_is_local=larger_is_local)
    assert any(says in axes.get_title() for axes in saved[0].axes)


def test_routing_panels_show_all_of_0_to_100_percent_with_room(saved):
    routing_chart([Estimate(1, 1, 1)], {"answers": [(0.0, Estimate(1, 1, 1))]}, "a.png")
    assert len(saved[0].axes) == 2
    for axes in saved[0].axes:
        low, high = axes.get_ylim()
        assert low < 0
        assert high > 100


def test_frontier_names_its_dashed_line_and_pattern_files_by_their_stems(saved):
    frontier_chart([*ROWS[:2], row("/some/folder/nll.json", [1], 0.7, 2)], "a.png", title="T")
    names = [text.get_text() for text in saved[0].legends[0].get_texts()]
    assert sorted(names) == ["best for its memory", "full", "nll", "window"]
