"""Pieces of the HTML report: what a model or a file is called cannot break out of them, and ticks are round numbers."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from swa_jax.report import html, svg

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
        html.figure(svg.scatter([svg.Mark(1, 2, NASTY, chosen=True)], xlabel=NASTY, ylabel=NASTY), NASTY),
    ]
    page = html.page(NASTY, body)
    assert "<b>" not in page
    assert page.count("</script>") == 0
    assert read(page).count(NASTY) == 17
    assert (html.heading("a"), html.heading("a", 1)) == ("<h2>a</h2>", "<h1>a</h1>")


def test_a_table_sets_off_one_row_and_aligns_numbers():
    table = html.table(["a", "b", "c"], [["x", "1", "2"], ["y", "3", "4"]], chosen=1, kinds=["bad", ""])
    rows = re.findall(r"<tr.*?</tr>", table)
    assert [row.startswith('<tr class="chosen">') for row in rows] == [False, False, True]
    assert '<td class="number bad">2</td>' in rows[1]
    assert [len(re.findall("number", row)) for row in rows] == [2, 2, 2]
    assert table.startswith('<div class="scroll">')


def test_layers_show_what_they_are():
    row = html.layer_row(["full", "window", "heads"])
    assert re.findall(r'class="(\w+)" title="(.*?)">(\d+)', row) == [
        ("full", "layer 0: full attention", "0"),
        ("window", "layer 1: a window", "1"),
        ("heads", "layer 2: single heads with full attention", "2"),
    ]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 100, [0, 20, 40, 60, 80, 100]),
        (-0.1, 1.6, [0, 0.5, 1, 1.5]),
        (-0.003, 0.004, [-0.002, 0, 0.002, 0.004]),
        (0, 7, [0, 2, 4, 6]),
    ],
)
def test_ticks_are_round(low, high, expected):
    assert svg.ticks(low, high) == pytest.approx(expected)


def test_points_lie_where_their_numbers_say():
    marks = [svg.Mark(0, 0, "a"), svg.Mark(50, 1, "b", chosen=True), svg.Mark(100, 0.5, "c", reference=True)]
    drawing = svg.scatter(marks, xlabel="x", ylabel="y", limit=50)
    root = ElementTree.fromstring(drawing)
    circles = {one[0].text: one for one in root.iter("circle")}
    x = {name: float(one.get("cx")) for name, one in circles.items()}
    y = {name: float(one.get("cy")) for name, one in circles.items()}
    assert x["b"] == pytest.approx((x["a"] + x["c"]) / 2, abs=0.2)
    assert y["b"] < y["c"] < y["a"]  # larger is higher
    assert y["c"] == pytest.approx((y["a"] + y["b"]) / 2, abs=0.2)
    (limit,) = [line for line in root.iter("line") if line.get("stroke-dasharray")]
    assert float(limit.get("x1")) == pytest.approx(x["b"], abs=0.2)
    assert circles["b"].get("fill") == "var(--accent)"
    assert circles["c"].get("fill") == "var(--ground)"


def test_bars_reach_from_zero_to_their_numbers():
    drawing = svg.bars([(2.0, 1.5, 2.5), (-1.0, None, None)], [0], xlabel="layer", ylabel="worth")
    root = ElementTree.fromstring(drawing)
    up, down = root.iter("rect")
    assert float(up.get("height")) == pytest.approx(2 * float(down.get("height")), abs=0.3)
    assert float(up.get("y")) + float(up.get("height")) == pytest.approx(float(down.get("y")), abs=0.2)
    assert [one.get("fill") for one in (up, down)] == ["var(--accent)", "var(--grey)"]
    assert len([line for line in root.iter("line") if line.get("stroke") == "var(--ink)"]) == 1
