"""The one style of all pictures: colours that colour-blind readers can tell apart, sizes, and how a file is written."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from numpy.typing import ArrayLike

from swa_jax.base.files import write_bytes

# Six colours of Okabe and Ito's eight (Color Universal Design, 2008): black is for text, yellow is too pale on white.
BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
HIGHLIGHTS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY)
GREY = "#C3C8CE"  # what stands behind the highlighted series
INK, AXIS, GRID = "#1F2328", "#6E7781", "#E4E7EB"
# The colours that a page has names for: there a picture follows the page, light or dark.
IN_PAGE = {INK: "ink", AXIS: "soft", GRID: "line", GREY: "grey", BLUE: "accent", VERMILION: "bad", "#ffffff": "ground"}

# Larger numbers are darker, in every map. Lightness alone tells them apart, so that no colour vision is needed.
SEQUENTIAL = LinearSegmentedColormap.from_list("swa-jax", ["#F5F8FB", "#A9CCE3", BLUE, "#003F66"])

SMALL = 8  # points
PAGE_WIDTH = 5.2  # inches of a picture in a page: its letters are then as large as the page's on 400 pixels
# A picture is drawn inside this context: `@styled`.
styled = mpl.rc_context(
    {
        "font.size": 9, "axes.labelsize": 9, "xtick.labelsize": SMALL, "ytick.labelsize": SMALL,
        "axes.titlesize": 9, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 5,
        "text.color": INK, "axes.labelcolor": INK, "axes.titlecolor": INK, "xtick.labelcolor": INK,
        "ytick.labelcolor": INK, "xtick.color": AXIS, "ytick.color": AXIS, "axes.edgecolor": AXIS,
        "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.7,
        "xtick.major.width": 0.7, "ytick.major.width": 0.7, "xtick.major.size": 3, "ytick.major.size": 3,
        "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True,
        "lines.linewidth": 1.5, "lines.markersize": 4.5, "errorbar.capsize": 2,
        "legend.frameon": False, "legend.fontsize": SMALL, "savefig.dpi": 200,
        "svg.hashsalt": "swa-jax",
    }
)  # fmt: skip


def new_figure(width: float, height: float, title: str = "") -> Figure:
    """An empty figure of this size in inches, at least as wide as its title."""
    figure = Figure(figsize=(max(width, 0.09 * len(title) + 0.2), height), layout="constrained")
    if title:
        figure.suptitle(title, x=0.008, ha="left", fontsize=10.5, fontweight="bold")
    return figure


def percent_axis(axes: Axes, which: str = "y", *, low: float = -4) -> None:
    """An axis from 0 to 100 % with room for marks at both ends."""
    limits: dict[str, Any] = {f"{which}lim": (low, 104), f"{which}ticks": [0, 25, 50, 75, 100]}
    axes.set(**limits)
    axes.grid(axis=which)  # type: ignore[arg-type]


def luminance(color: ArrayLike) -> float:
    """Relative luminance, from 0 to 1, of an sRGB colour of three or four numbers from 0 to 1 (WCAG 2.2)."""
    rgb = np.asarray(color, np.float64)[:3]
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def save(figure: Figure, to: str | Path | io.StringIO) -> None:
    """Write the picture: to a file as PNG, which appears whole or not at all; or as SVG, to stand inside a page."""
    if isinstance(to, io.StringIO):
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", transparent=True, metadata={"Date": None})
        text = drawn.getvalue()
        # A page may have several pictures, needs no namespaces, and links to nothing.
        text = re.sub(r'<metadata>.*?</metadata>|(?<=<g) id="[^"]*"| xmlns(:\w+)?="[^"]*"', "", text, flags=re.DOTALL)
        text = text[text.index("<svg") :].replace("xlink:href", "href")
        for color, name in IN_PAGE.items():
            text = text.replace(color.lower(), f"var(--{name})")
        to.write(text)
        return
    picture = io.BytesIO()
    FigureCanvasAgg(figure)
    figure.savefig(picture, format="png")
    write_bytes(to, picture.getvalue())
