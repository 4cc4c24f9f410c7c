"""Pictures: whole files, true positions, colours that colour-blind readers can tell apart, labels that do not touch."""

import ast
import itertools
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.text import Text

import swa_jax.report
from swa_jax.evaluate import Estimate
from swa_jax.report import style
from swa_jax.report.heat_maps import head_map, layer_ratio_map, loss_heat_map, needle_heat_map, ruler_heat, sweep_heat
from swa_jax.report.labels import apart, short_names
from swa_jax.report.layer_charts import layer_scores_chart, routing_chart
from swa_jax.report.line_charts import loss_curve, routed_cpt_chart, training_curves
from swa_jax.report.memory_charts import accuracy_memory_chart, candidates_chart, frontier_chart

PNG = b"\x89PNG\r\n\x1a\n"
MB = 2**20


def row(name, accuracy, megabytes, interval=0.1):
    ends = None if interval is None else [max(0, accuracy - interval), min(1, accuracy + interval)]
    return {"name": name, "needle_accuracy": accuracy, "needle_interval": ends, "kv_cache_bytes": int(megabytes * MB)}


# As the demo's: many at one point, so that a scatter plot hides all but one of them.
DEMO = [
    row("full", 1.0, 9),
    row("window", 0.0, 0.375),
    row("streaming", 0.0, 0.40625),
    row("nll-1-in-4", 1.0, 2.53125),
    row("interleave-1-in-4", 0.0, 2.53125),
    row("full+fa-decode", 1.0, 9),
    row("window+fa-decode", 1.0, 9),
    row("/a/folder/nll.json", 0.4, 2.75, None),
]
# As `compare`'s: 15 methods, most of which coincide somewhere.
METHODS = [row("full", 1.0, 2), row("window", 0.075, 0.1875)] + [
    row(f"method-{number}", max(0.075, 1 - number * ratio / 12), 2 - 1.8125 * ratio)
    for number in range(15)
    for ratio in (0.9375, 0.5, 0.75)
]
LOSSES = {f"a model with a long name, number {i}": [[7, 5, 4 + i / 10], [7.2, 5.1, 4.2]] for i in range(10)}
LINES = {f"niah_single_{i}, 4096 tokens": [(0.0, (0.1 * i, 0, 0.8)), (0.9, (0.5, None, None))] for i in range(6)}

PICTURES = {
    "needles": lambda file: needle_heat_map([[1.0, 0.0], [0.5, np.nan]], ["full", "window"], ["10 %", "50 %"], file),
    "losses": lambda file: loss_heat_map(
        [[3.0, 14.3], [3.1, np.nan]],
        ["softmax", "sigmoid"],
        ["32", "4096"],
        file,
        title="A title",
        row_title="Rows",
        column_title="Columns",
    ),
    "layers": lambda file: layer_scores_chart(
        [Estimate(0.5, 0.4, 0.7), Estimate(-0.1, -0.2, 0.0), (0.2, None, None)], [0], file, title="Layers"
    ),
    "many layers in a page": lambda file: layer_scores_chart([(0.1, None, None)] * 61, [3, 60], StringIO()),
    "heads": lambda file: head_map(
        np.eye(8, 4), file, title="Heads", scores=np.random.default_rng(0).random((8, 4)), larger_is_local=True
    ),
    "many heads": lambda file: head_map(np.eye(36, 32), file, title="Heads"),
    "patterns": lambda file: accuracy_memory_chart(DEMO, file),
    "candidates": lambda file: candidates_chart(
        [(0.2, 1.5), (0.28, -0.01), (0.29, 0.4)], 1, 0.3, file, xlabel="Cache (%)", ylabel="Loss\n(nats a token)"
    ),
    "methods": lambda file: frontier_chart(METHODS, file, title="What the memory buys"),
    "two methods": lambda file: frontier_chart(METHODS[:8], file, title="What the memory buys"),
    "training": lambda file: routed_cpt_chart(
        [{"step": i, "loss": 2.0 - i, "full_attention_ratio": 0.5} for i in (1, 2)], file
    ),
    "ratio": lambda file: layer_ratio_map(np.linspace(0, 1, 24).reshape(8, 3), 10, file, title="A title"),
    "losses of a run": lambda file: loss_curve(
        [{"step": i, ("validation_loss" if i % 50 == 0 else "loss"): 7 / (1 + i / 90)} for i in range(900)], file
    ),
    "ten losses": lambda file: training_curves(LOSSES, 10, file, title="T", ylabel="Loss"),
    "two losses": lambda file: training_curves(
        {"one": [[3.0, 2.0], [3.1, 2.2]], "two": [[3.0, 2.0]], "three": [[3.0, 2.01]]},
        10,
        file,
        title="T",
        ylabel="Loss",
    ),
    "routing": lambda file: routing_chart([(1, 1, 1)] * 8, dict(list(LINES.items())[:3]), file),
    "much routing": lambda file: routing_chart([(0.5, None, None)] * 8, LINES, file),
}


@pytest.fixture
def saved(monkeypatch):
    """The figures that are written, to look into."""
    figures = []
    monkeypatch.setattr(style, "save", lambda figure, file: figures.append(figure))
    return figures


@pytest.fixture(scope="module", params=PICTURES)
def figure(request):
    """Each picture, laid out."""
    drawn = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(style, "save", lambda figure, file: drawn.append(figure))
        PICTURES[request.param]("a.png")
    FigureCanvasAgg(drawn[0]).draw()
    return drawn[0]


def test_a_picture_is_a_whole_png_and_nothing_else_is_left(tmp_path):
    names = ["heads", "methods", "training"]
    for name in names:
        PICTURES[name](tmp_path / f"{name}.png")
    assert sorted(file.stem for file in tmp_path.iterdir()) == names
    for file in tmp_path.iterdir():
        assert file.read_bytes().startswith(PNG)


def test_report_imports_nothing_that_measures():
    for file in Path(swa_jax.report.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                allowed = (
                    "swa_jax.report",
                    "swa_jax.base.exports",
                    "swa_jax.base.files",
                )  # what stands on no measurement
                assert not name.startswith("swa_jax") or name.startswith(allowed), f"{file}: {name}"


# ---- colours ----

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
BLINDNESS = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
}


def lab(color, matrix):
    """CIE L*a*b* of an sRGB colour as someone with this colour vision sees it."""
    rgb = np.array(to_rgb(color))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(matrix @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ seen / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", BLINDNESS)
def test_highlights_differ_for_every_colour_vision(vision):
    matrix = np.array(BLINDNESS[vision])
    for one, other in itertools.combinations((*style.HIGHLIGHTS, style.GREY), 2):
        assert np.linalg.norm(lab(one, matrix) - lab(other, matrix)) > 12, (one, other)
    # Red and green, which the maps of needles once had, would not pass.
    if vision == "deuteranopia":
        assert np.linalg.norm(lab("#d73027", matrix) - lab("#1a9850", matrix)) < 40


@pytest.mark.parametrize("vision", BLINDNESS)
def test_maps_grow_darker_with_the_number(vision):
    matrix = np.array(BLINDNESS[vision])
    lightness = [lab(style.SEQUENTIAL(x), matrix)[0] for x in np.linspace(0, 1, 50)]
    assert (np.diff(lightness) < -0.5).all()


def colors(figure):
    """The colours of all lines, marks, bars and bands that are no grey."""
    found = set()
    for axes in figure.axes:
        for line in axes.lines:
            if line.get_linestyle() != "None":
                found.add(to_hex(line.get_color()))
            if line.get_marker() != "None":
                found.add(to_hex(line.get_markeredgecolor()))
        for patch in axes.patches:
            found.add(to_hex(patch.get_facecolor()))
        for collection in axes.collections:
            if collection.get_array() is None:
                found |= {to_hex(c) for c in (*collection.get_facecolor(), *collection.get_edgecolor())}
    return {color for color in found if np.ptp(to_rgb(color)) > 0.15}


def test_at_most_six_colours_and_all_of_them_the_styles(figure):
    assert len(colors(figure)) <= 6
    assert colors(figure) <= {color.lower() for color in style.HIGHLIGHTS}


# ---- labels ----


def texts(figure):
    """Every text that is drawn."""
    parts = [figure]
    while parts:
        part = parts.pop()
        parts += part.subfigs
        yield from part.texts  # its title and its common axis labels, too
    for axes in figure.axes:
        yield from (*axes.texts, axes.title, axes._left_title, axes._right_title)
        yield from ([] if axes.get_legend() is None else axes.get_legend().get_texts())
        for axis in (axes.xaxis, axes.yaxis):
            yield axis.label
            low, high = sorted(axis.get_view_interval())
            for tick in axis.get_major_ticks():
                if low <= tick.get_loc() <= high:
                    yield from (tick.label1, tick.label2)


def test_labels_touch_neither_one_another_nor_the_edge(figure):
    drawn = [text for text in texts(figure) if text.get_visible() and text.get_text().strip()]
    # Not an annotation's own extent, which has its leading line in it.
    boxes = [(text.get_text(), Text.get_window_extent(text)) for text in drawn]
    assert len(boxes) > 4
    for (name, box), (other, second) in itertools.combinations(boxes, 2):
        across = min(box.x1, second.x1) - max(box.x0, second.x0)
        down = min(box.y1, second.y1) - max(box.y0, second.y0)
        assert min(across, down) < 1, f"{name!r} and {other!r}"
    for name, box in boxes:
        assert box.x0 >= -1, name
        assert box.y0 >= -1, name
        assert box.x1 <= figure.bbox.x1 + 1, name
        assert box.y1 <= figure.bbox.y1 + 1, name


def test_labels_are_moved_apart_as_little_as_needed():
    np.testing.assert_allclose(apart([1, 50, 99], gap=5, low=0, high=100), [1, 50, 99])
    moved = apart([98, 99, 100], gap=5, low=0, high=100)
    assert (np.diff(moved) >= 5).all()
    assert moved.max() <= 100


def test_pattern_files_are_named_without_folder_unless_two_would_be_the_same():
    assert short_names(["full", "/a/b, c/nll.json", "/a/x.json, niah, 4096", "layers:2,3"]) == [
        "full",
        "nll",
        "x, niah, 4096",
        "layers:2,3",
    ]
    assert short_names(["nll", "/a/nll.json", "/a/nll.json"]) == ["nll", "nll.json", "nll.json"]
    assert short_names(["/a/nll.json", "/b/nll.json"]) == ["/a/nll.json", "/b/nll.json"]


# ---- positions ----


def blue_points(axes):
    """Data coordinates of the highlighted line."""
    (line,) = [line for line in axes.lines if line.get_color() == style.BLUE and line.get_linestyle() == "-"]
    return line.get_xydata()


def bars(axes):
    """The ends of the vertical error bars that are drawn [N, 2]."""
    found = []
    for container in axes.containers:
        for collection in getattr(container, "lines", ((), (), ()))[2]:
            segments = [segment for segment in collection.get_segments() if len(segment)]
            found += [segment[:, 1] for segment in segments if np.isfinite(segment).all()]
    return np.array(found)


def test_patterns_stand_where_their_numbers_say(saved):
    accuracy_memory_chart(DEMO, "a.png")
    found, memory = saved[0].axes
    names = [label.get_text() for label in found.get_yticklabels()]
    assert len(names) == len(set(names)) == len(DEMO)
    (points,) = [c for c in found.collections if len(c.get_offsets()) == len(DEMO)]
    drawn = {
        name: (x, y, bar.get_width())
        for name, (x, y), bar in zip(names, points.get_offsets(), memory.patches, strict=True)
    }
    for one in DEMO:
        x, y, width = drawn["nll" if "/" in one["name"] else one["name"]]
        assert x == pytest.approx(100 * one["needle_accuracy"])
        assert width == pytest.approx(one["kv_cache_bytes"] / MB)
        assert y == names.index("nll" if "/" in one["name"] else one["name"])


def test_patterns_that_nothing_beats_are_blue(saved):
    accuracy_memory_chart([*DEMO, row("as good", 1.0, 2.53125)], "a.png")
    labels = saved[0].axes[0].get_yticklabels()
    assert {t.get_text() for t in labels if t.get_color() == style.BLUE} == {"window", "nll-1-in-4", "as good"}


def test_methods_stand_where_their_numbers_say_and_none_left_of_the_dashed_best(saved):
    frontier_chart(METHODS, "a.png", title="T")
    assert len(saved[0].axes) == 15
    for axes in saved[0].axes:
        rows = sorted((r for r in METHODS if r["name"] == axes.get_title("left")), key=lambda r: r["kv_cache_bytes"])
        expected = [(r["kv_cache_bytes"] / MB, 100 * r["needle_accuracy"]) for r in rows]
        np.testing.assert_allclose(blue_points(axes), expected)
        np.testing.assert_allclose(bars(axes), [[100 * end for end in r["needle_interval"]] for r in rows])
        (step,) = [line for line in axes.lines if line.get_drawstyle() == "steps-post"]
        memory, best = step.get_xydata().T
        for x, y in blue_points(axes):
            assert y <= best[memory <= x + 1e-9].max() + 1e-9


def test_the_dashed_best_never_falls(saved):
    """More memory can be used badly: what a smaller pattern finds is still to be had."""
    rows = [row("a", 0.2, 0.3), row("a", 0.9, 0.5), row("a", 0.5, 1), row("full", 0.4, 2)]
    frontier_chart(rows, "a.png", title="T")
    (step,) = [line for line in saved[0].axes[0].lines if line.get_drawstyle() == "steps-post"]
    np.testing.assert_allclose(step.get_xydata(), [(0.3, 20), (0.5, 90), (1, 90), (2, 90)], rtol=1e-5)


def test_other_patterns_have_a_panel_and_full_and_window_stand_in_all(saved):
    frontier_chart([*METHODS[:5], row("/a/mine.json", 0.7, 1, None)], "a.png", title="T")
    panels = {axes.get_title("left"): axes for axes in saved[0].axes}
    assert list(panels) == ["method-0", "mine"]
    np.testing.assert_allclose(blue_points(panels["mine"]), [(1, 70)])
    assert len(bars(panels["mine"])) == 0
    for axes in panels.values():
        assert [text.get_text() for text in axes.texts] == ["full", "window"]
        assert [text.xy for text in axes.texts] == [(2, 100), (0.1875, 7.5)]


def test_without_methods_the_patterns_are_drawn(saved):
    frontier_chart(DEMO, "a.png", title="T")
    assert len(saved[0].axes[0].get_yticklabels()) == len(DEMO)


@pytest.mark.parametrize("count", [1, 4, 5, 10])
def test_losses_are_means_over_seeds_inside_their_range(saved, count):
    curves = dict(list(LOSSES.items())[:count])
    training_curves(curves, 10, "a.png", title="T", ylabel="Loss")
    highlighted = []
    for axes in saved[0].axes:
        shown = [line for line in axes.lines if line.get_color() in style.HIGHLIGHTS]
        highlighted += [line.get_xydata() for line in shown]
        for line, band in zip(shown, axes.collections, strict=True):
            low, high = band.get_datalim(axes.transData).intervaly
            assert low <= line.get_ydata().min() <= line.get_ydata().max() <= high
    assert len(saved[0].axes) == (1 if count <= 4 else count)
    for data, seeds in zip(highlighted, curves.values(), strict=True):
        np.testing.assert_allclose(data.T, [[5, 15, 25], np.mean(seeds, 0)])


def test_maps_show_the_numbers(saved):
    needle_heat_map([[1.0, 0.25], [np.nan, 0.5]], ["a", "b"], ["1", "2"], "a.png")
    axes = saved[0].axes[0]
    np.testing.assert_allclose(axes.images[0].get_array().filled(np.nan), [[100, 25], [np.nan, 50]])
    assert axes.images[0].get_clim() == (0, 100)  # a colour means the same in every map
    assert {t.get_position(): t.get_text() for t in axes.texts} == {(0, 0): "100", (1, 0): "25", (1, 1): "50"}


def test_loss_map_says_where_its_colours_end(saved):
    loss_heat_map([[3.0, 14.3]], ["a"], ["1", "2"], "a.png", title="T")
    loss_heat_map([[3.0, 3.3]], ["a"], ["1", "2"], "a.png", title="T")
    assert saved[0]._supxlabel.get_text() == "From 4.50 on the colour is the same."
    assert saved[1]._supxlabel is None


def test_heat_map_refuses_labels_that_do_not_fit(tmp_path):
    with pytest.raises(ValueError, match="there are 1 and 2 labels"):
        needle_heat_map([[1.0, 0.0], [0.5, 0.5]], ["full"], ["10 %", "50 %"], tmp_path / "a.png")


def test_layers_without_an_interval_have_a_bar_and_no_whiskers(saved):
    layer_scores_chart([(0.5, 0.4, 0.7), (0.2, None, None), (-0.1, -0.2, 0)], [0], "a.png", title="T")
    axes = saved[0].axes[0]
    heights = {round(patch.get_x() + patch.get_width() / 2): patch.get_height() for patch in axes.patches}
    assert heights == {0: 0.5, 1: 0.2, 2: -0.1}
    np.testing.assert_allclose(bars(axes), [[0.4, 0.7], [-0.2, 0]])


@pytest.mark.parametrize(("larger_is_local", "says"), [(True, "large: windowed"), (False, "large: stays full")])
def test_head_map_says_which_end_of_the_scores_is_windowed(saved, larger_is_local, says):
    scores = [[0.1, 0.9], [0.5, 0.2]]
    head_map(np.eye(2), "a.png", title="T", scores=scores, larger_is_local=larger_is_local)
    assert any(says in axes.get_title("left") for axes in saved[0].axes)


def test_routing_panels_show_all_of_0_to_100_percent_with_room(saved):
    routing_chart([Estimate(1, 1, 1)], {"answers": [(0.0, Estimate(1, 1, 1))]}, "a.png")
    assert len(saved[0].axes) == 2
    for axes in saved[0].axes:
        low, high = axes.get_ylim()
        assert low < 0
        assert high > 100


def test_grids_of_ruler_and_of_the_sweep():
    ruler = [
        {"name": name, "task": "niah", "length": 512, "depth": depth, "score": score}
        for name, depth, score in (("a", 0.1, 1.0), ("a", 0.9, 0.5), ("b", 0.1, 0.25), ("b", 0.9, 0.0))
    ]
    assert ruler_heat(ruler) == ([[1.0, 0.5], [0.25, 0.0]], ["a, niah, 512", "b, niah, 512"], ["10%", "90%"])
    drawn = [row | {"depth": None, "task": f"niah_{row['depth']}"} for row in ruler]
    assert ruler_heat(drawn) == ([[1.0, 0.5], [0.25, 0.0]], ["a, 512", "b, 512"], ["0.1", "0.9"])
    sweep = [{"name": "a", "window": window, "length": 128, "nll": 2.5} for window in (16, None)]
    assert sweep_heat(sweep) == ([[2.5], [2.5]], ["a, window 16", "a, window full"], ["128"])
