"""Pieces of a report that is one HTML file: it links to nothing, and can be read light or dark, wide or narrow."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from io import StringIO

from swa_jax.report.style import BLUE, GREEN, GREY, INK, ORANGE, SKY, VERMILION

# On a dark ground the palette's own lighter colours stand in for the darker ones.
_STYLE = f"""
:root {{ color-scheme: light dark; --ground: #ffffff; --panel: #f5f7f9; --ink: {INK}; --soft: #57606a;
  --line: #d8dee4; --accent: {BLUE}; --grey: {GREY}; --good: #00694d; --bad: {VERMILION}; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ground: #14181d; --panel: #1d232a; --ink: #e6edf3; --soft: #9aa6b2; --line: #343d47;
    --accent: {SKY}; --grey: #6e7b88; --good: {GREEN}; --bad: {ORANGE}; }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--ground); color: var(--ink); line-height: 1.55;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }}
main {{ max-width: 62rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }}
h1 {{ font-size: 1.8rem; line-height: 1.2; margin: 0 0 .4rem; }}
h2 {{ font-size: 1.2rem; margin: 2.6rem 0 .5rem; padding-top: .9rem; border-top: 1px solid var(--line); }}
p, li {{ max-width: 46rem; }}
.lead {{ font-size: 1.1rem; }}
.soft, figcaption, .unit {{ color: var(--soft); font-size: .9rem; }}
.cards {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(12.5rem, 1fr)); gap: .8rem; margin: 1.4rem 0; }}
.card {{ background: var(--panel); border-radius: .5rem; padding: .8rem 1rem; }}
.card strong {{ display: block; font-size: 1.55rem; line-height: 1.25; font-variant-numeric: tabular-nums; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; min-width: 100%; }}
th, td {{ text-align: left; padding: .4rem .9rem .4rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }}
th {{ font-weight: 600; font-size: .87rem; color: var(--soft); vertical-align: bottom; }}
td:first-child {{ min-width: 10rem; }}
.number {{ text-align: right; }}
th:last-child, td:last-child {{ padding-right: 0; }}
.more {{ display: block; color: var(--soft); font-size: .85em; font-weight: 400; }}
.number .more {{ white-space: nowrap; }}
tr.chosen td {{ background: var(--panel); font-weight: 600; }}
.good {{ color: var(--good); }} .bad {{ color: var(--bad); }}
@media (max-width: 56rem) {{ /* each row of a wide table becomes a list of its columns */
  td, th {{ padding-right: .5rem; }}
  td:first-child {{ min-width: 0; }}
  .wide thead {{ display: none; }}
  .wide, .wide tbody, .wide tr, .wide td {{ display: block; }}
  .wide tr {{ border-bottom: 1px solid var(--line); padding: .5rem 0; }}
  .wide td {{ border: 0; padding: .1rem 0; display: flex; justify-content: space-between; gap: 1rem;
    text-align: right; }}
  .wide td::before {{ content: attr(data-title); color: var(--soft); text-align: left; }}
  .wide td:first-child {{ display: block; text-align: left; font-weight: 600; }}
  .wide td:first-child::before {{ content: attr(data-title) ": "; font-weight: 400; }}
  .wide td:first-child div {{ display: inline; }} .wide td:empty {{ display: none; }} }}
pre {{ background: var(--panel); padding: .9rem 1rem; border-radius: .5rem; font-size: .88rem; white-space: pre-wrap;
  overflow-wrap: anywhere; }}
code {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }}
.layers {{ display: flex; flex-wrap: wrap; gap: 4px; padding: 0; margin: .8rem 0; list-style: none; }}
.layers li {{ width: 2.3rem; height: 2.3rem; display: grid; place-items: center; border-radius: .3rem;
  font-size: .85rem; border: 1px solid var(--line); color: var(--soft); }}
.layers li.full {{ background: var(--accent); border-color: var(--accent); color: var(--ground); font-weight: 700; }}
.layers li.heads {{ border: 2px solid var(--accent); color: var(--ink); }}
figure {{ margin: 1rem 0; }}
svg {{ display: block; width: 100%; max-width: 44rem; height: auto; }}
"""


def page(title: str, body: Sequence[str]) -> str:
    """A whole file; `body` is of pieces that are HTML already."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            "</head>",
            "<body><main>",
            *body,
            "</main></body>",
            "</html>",
            "",
        ]
    )


def escape(text: object) -> str:
    return html.escape(str(text))


def heading(text: str, level: int = 2) -> str:
    return f"<h{level}>{escape(text)}</h{level}>"


def paragraph(text: str, kind: str = "") -> str:
    return f"<p{_class(kind)}>{escape(text)}</p>"


def bullets(items: Sequence[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def code(lines: Sequence[str]) -> str:
    return f"<pre><code>{escape(chr(10).join(lines))}</code></pre>"


def cards(figures: Sequence[tuple[str, str]]) -> str:
    """Large figures with what each is."""
    inner = [
        f'<div class="card"><strong>{escape(value)}</strong><span class="unit">{escape(about)}</span></div>'
        for value, about in figures
    ]
    return f'<div class="cards">{"".join(inner)}</div>'


def table(
    titles: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    text_columns: int = 1,
    chosen: int | None = None,
    kinds: Sequence[str] | None = None,
) -> str:
    """A table; where the window is narrow, each row of more than 4 columns becomes a list, so that none is cut off.

    What follows a newline in a cell stands below, smaller.

    Args:
      text_columns: how many columns, from the left, hold text; the others hold numbers.
      chosen: the row that is set off.
      kinds: for each row a class of its last cell of text: "good", "bad" or "".
    """

    def cell(place: int, text: str, kind: str) -> str:
        name = kind if place == text_columns - 1 else kind_of[place]
        first, _, more = escape(text).partition("\n")
        below = f'<span class="more">{more}</span>' if more else ""
        # In one element, as a narrow window sets title and text side by side.
        inner = f"<div>{first}{below}</div>" if text else ""
        return f'<td{_class(name)} data-title="{escape(titles[place])}">{inner}</td>'

    kind_of = ["number" if place >= text_columns else "" for place in range(len(titles))]
    heads = [f"<th{_class(kind)}>{escape(title)}</th>" for kind, title in zip(kind_of, titles, strict=True)]
    lines = []
    for number, row in enumerate(rows):
        inner = [cell(place, text, kinds[number] if kinds else "") for place, text in enumerate(row)]
        lines.append(f"<tr{_class('chosen' if number == chosen else '')}>{''.join(inner)}</tr>")
    wide = "wide" if len(titles) > 4 else ""
    return f"<table{_class(wide)}><thead><tr>{''.join(heads)}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def layer_row(kinds: Sequence[str]) -> str:
    """A box for each layer: its number, filled where it is "full", framed where single "heads" are."""
    names = {"full": "full attention", "heads": "single heads with full attention", "window": "a window"}
    boxes = [
        f'<li class="{kind}" title="layer {number}: {names[kind]}">{number}</li>' for number, kind in enumerate(kinds)
    ]
    return f'<ol class="layers" aria-label="layers">{"".join(boxes)}</ol>'


def figure(draw: Callable[[StringIO], None], caption: str) -> str:
    """A picture that one of this package's charts draws, with its caption."""
    drawing = StringIO()
    draw(drawing)
    picture = drawing.getvalue().replace("<svg ", f'<svg role="img" aria-label="{escape(caption)}" ', 1)
    return f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"


def _class(name: str) -> str:
    return f' class="{name}"' if name else ""
