"""Pieces of the HTML report: what a model or a file is called cannot break out of them, and ticks are round numbers."""

import re
from functools import partial
from html.parser import HTMLParser

import numpy as np

from swa_jax.report import html
from swa_jax.report.layer_charts import layer_scores_chart
from swa_jax.report.memory_charts import candidates_chart

NASTY = "<b>&\"'</script>"
VOID = {"meta", "br"}


class Nesting(HTMLParser):
    """Elements that are open; fails where one is closed that is not the innermost."""

    def __init__(self):
        super().__init__()
        self.open, self.text = [], ""

    def handle_starttag(self, tag, attrs):
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(page):
    parser = Nesting()
    parser.feed(page)
    assert parser.open == []
    return parser.text


def test_every_piece_escapes_what_it_is_given():
    body = [
        html.heading(NASTY),
        html.paragraph(NASTY, "soft"),
        html.bullets([NASTY]),
        html.code([NASTY, NASTY]),
        html.cards([(NASTY, NASTY)]),
        html.table([NASTY, "n"], [[NASTY, "1"]]),
        html.figure(lambda page: page.write("<svg ></svg>"), NASTY),
    ]
    page = html.page(NASTY, body)
    assert "<b>" not in page
    assert page.count("</script>") == 0
    assert read(page).count(NASTY) == 11
    assert (html.heading("a"), html.heading("a", 1)) == ("<h2>a</h2>", "<h1>a</h1>")


def test_a_table_sets_off_one_row_and_aligns_numbers():
    table = html.table(["a", "b", "c"], [["x\n[y]", "1", "2"], ["y", "3", ""]], chosen=1, kinds=["bad", ""])
    rows = re.findall(r"<tr.*?</tr>", table)
    assert [row.startswith('<tr class="chosen">') for row in rows] == [False, False, True]
    assert '<td class="bad" data-title="a"><div>x<span class="more">[y]</span></div></td>' in rows[1]
    assert [len(re.findall("number", row)) for row in rows] == [2, 2, 2]
    assert (table[:7], html.table(["n"] * 5, [])[:20]) == ("<table>", '<table class="wide">')


def test_layers_show_what_they_are():
    row = html.layer_row(["full", "window", "heads"])
    assert re.findall(r'class="(\w+)" title="(.*?)">(\d+)', row) == [
        ("full", "layer 0: full attention", "0"),
        ("window", "layer 1: a window", "1"),
        ("heads", "layer 2: single heads with full attention", "2"),
    ]


def points(page: str, color: str) -> np.ndarray:
    """Where the marks of this colour stand, in the picture's units [N, 2], y downwards."""
    marks = re.findall(r'<use href="[^"]*" x="([\d.]+)" y="([\d.]+)" style="([^"]*)"', page)
    return np.array([(float(x), float(y)) for x, y, style in marks if f"fill: var(--{color})" in style])


def test_points_stand_where_their_numbers_say_in_the_colours_of_the_page():
    draw = partial(candidates_chart, [(0.2, 1.0), (0.6, 0.5), (0.4, 2.0)], 1, 0.3, xlabel="x", ylabel="y")
    page = html.figure(draw, "A caption")
    read(page)
    assert 'aria-label="A caption"' in page
    assert not re.search(r"xmlns|xlink|<metadata|#[0-9a-fA-F]{6}", page)
    candidates, (chosen,), (original,) = (points(page, name) for name in ("grey", "accent", "ground"))
    x, y = np.array([*candidates, original]).T
    np.testing.assert_allclose((x - x[0]) / (x[3] - x[0]), [0, 1 / 2, 1 / 4, 1], atol=1e-3)
    np.testing.assert_allclose((y - y[3]) / (y[2] - y[3]), [1 / 2, 1 / 4, 1, 0], atol=1e-3)
    assert y[2] < y[3], "more loss is higher"
    np.testing.assert_allclose(chosen, candidates[1], atol=0.01)


def test_pictures_in_one_page_name_only_what_is_the_same_in_all():
    """Glyphs and marks, whose ids are made of what they look like; bars without a mean are not drawn."""
    bars = partial(layer_scores_chart, [(2.0, 1.5, 2.5), (-1.0, None, None), (None, None, None)], [0])
    page = html.figure(bars, "")
    ids = re.findall(r' id="([^"]*)"', page)
    assert ids
    assert all(re.fullmatch(r"[mp][0-9a-f]{10}|DejaVuSans.*", name) for name in ids)
    filled = [len(re.findall(f'style="fill: var\\(--{name}\\)"', page)) for name in ("accent", "grey")]
    assert filled == [2, 3]  # a bar and the legend's; two bars, one of no height, and the legend's
