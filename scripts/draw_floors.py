"""Draw docs/images/floors.svg from the table of floors in docs/architecture.md: `python scripts/draw_floors.py`."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
PICTURE = DOCS / "images" / "floors.svg"

FLOOR_HEIGHT, BOX_HEIGHT, LEFT, GAP, MARGIN = 52, 34, 92, 10, 16
LETTER = 8.2  # width of a letter of the boxes' 14 px monospace type
INK, LINE, GROUND, BOX = "#1b1b1b", "#9a9a9a", "#ffffff", {"swa_jax": "#dcebf7", "other": "#fbe6cc"}


def read_floors(page: str) -> list[tuple[int, list[str]]]:
    """(floor, names of its rooms) from the table's rows, the highest floor first."""
    rows = re.findall(r"(?m)^\| (\d+) \| (.+?) \|", page)
    return sorted(((int(floor), re.findall(r"`([\w.]+)`", rooms)) for floor, rooms in rows), reverse=True)


def draw(floors: list[tuple[int, list[str]]]) -> str:
    """The picture as SVG: a row of boxes for each floor, and one arrow for all imports."""
    height = FLOOR_HEIGHT * len(floors) + 2 * MARGIN
    shapes, width = [], 0.0
    for row, (floor, rooms) in enumerate(floors):
        top = MARGIN + row * FLOOR_HEIGHT
        middle = top + BOX_HEIGHT / 2
        shapes.append(f'<text x="{LEFT - 14}" y="{middle + 5:g}" text-anchor="end">floor {floor}</text>')
        x = float(LEFT)
        for room in rooms:
            wide = round(LETTER * len(room) + 22)
            color = BOX["swa_jax" if room.startswith("swa_jax") else "other"]
            shapes.append(
                f'<rect x="{x:g}" y="{top}" width="{wide}" height="{BOX_HEIGHT}" rx="4" '
                f'fill="{color}" stroke="{LINE}"/>'
            )
            shapes.append(
                f'<text class="room" x="{x + wide / 2:g}" y="{middle + 5:g}" text-anchor="middle">{room}</text>'
            )
            x += wide + GAP
        width = max(width, x)
    arrow, bottom = width + 18, height - MARGIN - (FLOOR_HEIGHT - BOX_HEIGHT)
    label = f"{arrow + 22:g} {height / 2:g}"
    shapes += [
        f'<path d="M {arrow:g} {MARGIN} V {bottom - 8}" stroke="{INK}" stroke-width="2" fill="none"/>',
        f'<path d="M {arrow - 6:g} {bottom - 10} h 12 l -6 10 z" fill="{INK}"/>',
        f'<text transform="translate({label}) rotate(90)" text-anchor="middle">imports run downwards only</text>',
    ]
    width = round(arrow + 48)
    style = f"text {{ font: 14px sans-serif; fill: {INK} }} .room {{ font-family: monospace }}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}">',
            "<title>The rooms of the code, floor by floor</title>",
            f"<style>{style}</style>",
            f'<rect width="{width}" height="{height}" fill="{GROUND}"/>',
            *shapes,
            "</svg>\n",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(draw(read_floors((DOCS / "architecture.md").read_text())))
    print(PICTURE)
