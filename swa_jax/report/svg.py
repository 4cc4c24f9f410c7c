"""Pictures inside a report of HTML: SVG that takes its colours from the page, light or dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from swa_jax.report.html import escape

WIDTH, LEFT, RIGHT = 760, 74, 24


class Mark(NamedTuple):
    """A point of `scatter`."""

    x: float
    y: float
    name: str
    chosen: bool = False
    reference: bool = False  # an open circle, such as the model as it was


def scatter(marks: Sequence[Mark], *, xlabel: str, ylabel: str, limit: float | None = None) -> str:
    """Points on two axes that begin at 0 or below, with a vertical line at `limit`. The chosen one has its name."""
    height, top, bottom = 330, 24, 52
    x_high = 1.06 * max([mark.x for mark in marks] + [limit or 0.0])
    y_low, y_high = min(0.0, *(mark.y for mark in marks)), max(mark.y for mark in marks)
    reach = (y_high - y_low) or 1e-3
    y_low, y_high = y_low - 0.08 * reach, y_high + 0.08 * reach

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / x_high
        return across, top + (height - top - bottom) * (y_high - y) / (y_high - y_low)

    shapes = _frame(height, xlabel, ylabel, top, bottom)
    for tick in ticks(0.0, x_high, about=8):
        x, _ = place(tick, 0.0)
        shapes.append(_text(x, height - bottom + 18, f"{tick:g}", "middle"))
    for tick in ticks(y_low, y_high):
        _, y = place(0.0, tick)
        shapes.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        shapes.append(_text(LEFT - 8, y + 4, f"{tick:g}", "end"))
    if limit is not None:
        x, _ = place(limit, 0.0)
        shapes.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{height - bottom}" stroke="var(--bad)" '
            'stroke-dasharray="5 4"/>'
        )
        shapes.append(_text(x + 6, top + 4, "budget", "start"))
    for mark in sorted(marks, key=lambda mark: mark.chosen):
        x, y = place(mark.x, mark.y)
        fill = "var(--ground)" if mark.reference else "var(--accent)" if mark.chosen else "var(--grey)"
        edge = "var(--ink)" if mark.reference else fill
        shapes.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{7 if mark.chosen else 5}" fill="{fill}" stroke="{edge}" '
            f'stroke-width="1.5"><title>{escape(mark.name)}</title></circle>'
        )
        if mark.chosen or mark.reference:
            aside, anchor = (-11, "end") if x > 0.75 * WIDTH else (11, "start")
            shapes.append(
                f'<text x="{x + aside:.1f}" y="{y - 9:.1f}" text-anchor="{anchor}" font-weight="600">'
                f"{escape(mark.name)}</text>"
            )
    return _svg(height, f"{ylabel} against {xlabel}", shapes)


def bars(values: Sequence[Sequence[float | None]], filled: Sequence[int], *, xlabel: str, ylabel: str) -> str:
    """A bar for each value, of mean, low and high, with its interval; those numbered in `filled` stand out. A mean of
    None has no bar."""
    height, top, bottom = 260, 16, 52
    ends = [end for value in values for end in value if end is not None]
    low, high = min(0.0, *ends), max(0.0, *ends)
    reach = (high - low) or 1e-3
    low, high = low - 0.04 * reach, high + 0.06 * reach
    step = (WIDTH - LEFT - RIGHT) / len(values)

    def y_of(value: float) -> float:
        return top + (height - top - bottom) * (high - value) / (high - low)

    shapes = _frame(height, xlabel, ylabel, top, bottom)
    for tick in ticks(low, high):
        y = y_of(tick)
        shapes.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="var(--line)"/>')
        shapes.append(_text(LEFT - 8, y + 4, f"{tick:g}", "end"))
    every = math.ceil(len(values) / 24)
    for number, (mean, *interval) in enumerate(values):
        x = LEFT + step * (number + 0.5)
        if number % every == 0:
            shapes.append(_text(x, height - bottom + 18, str(number), "middle"))
        if mean is None:
            continue
        up, down = y_of(max(mean, 0.0)), y_of(min(mean, 0.0))
        color = "var(--accent)" if number in filled else "var(--grey)"
        shapes.append(
            f'<rect x="{x - 0.36 * step:.1f}" y="{up:.1f}" width="{0.72 * step:.1f}" '
            f'height="{max(down - up, 1):.1f}" rx="2" fill="{color}"><title>layer {number}: {mean:.3f}</title></rect>'
        )
        if None not in interval:
            first, last = (y_of(end) for end in interval if end is not None)
            shapes.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{first:.1f}" y2="{last:.1f}" stroke="var(--ink)" '
                'stroke-width="1.4"/>'
            )
    return _svg(height, f"{ylabel} by {xlabel}", shapes)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from `low` to `high`, about so many."""
    size = (high - low) / about
    step = 10.0 ** math.floor(math.log10(size))
    step *= next(times for times in (1, 2, 5, 10) if times * step >= size)
    first = math.ceil(low / step - 1e-9)
    return [round(number * step, 12) for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _frame(height: int, xlabel: str, ylabel: str, top: int, bottom: int) -> list[str]:
    middle = (top + height - bottom) / 2
    return [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{height - bottom}" y2="{height - bottom}" stroke="var(--soft)"/>',
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{height - 8}" text-anchor="middle">{escape(xlabel)}</text>',
        f'<text transform="translate(16 {middle}) rotate(-90)" text-anchor="middle">{escape(ylabel)}</text>',
    ]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text class="soft" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(height: int, title: str, shapes: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}"><title>{escape(title)}</title>'
        + "".join(shapes)
        + "</svg>"
    )
