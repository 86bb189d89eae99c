"""Style of all pictures: colours that colour-blind readers tell apart, on a ground that may be light or dark.

A title begins with the kind of its numbers: "Measured:", "Simulated:" or "Planned:". matplotlib is loaded on the first
drawing.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

BLUE, VERMILION, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
SKY, ORANGE, YELLOW = "#56b4e9", "#e69f00", "#f0e442"
COLOURS = (BLUE, VERMILION, GREEN, PURPLE, SKY, ORANGE, YELLOW)
"""Okabe and Ito's palette."""
INK = "#808080"
"""Words and lines are visible on white and on black."""
WIDTH = 8.3
"""Inches: 830 pixels of a page."""
KINDS = ("Measured: ", "Simulated: ", "Planned: ")
"""Prefixes of titles."""
_INKED = ("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "xtick.color", "ytick.color", "legend.labelcolor",
          "text.color")


def looks(ink: str = INK) -> dict[str, Any]:
    """matplotlib's settings."""
    return {**dict.fromkeys(_INKED, ink), "svg.fonttype": "none", "svg.hashsalt": "megatron-recycle", "font.size": 9,
            "axes.spines.top": False, "axes.spines.right": False}


def figure(title: str, height: float, columns: int = 1, **options: Any) -> tuple[Any, Sequence[Any]]:
    """A figure of the width of a page with panels side by side. ``options``: those of matplotlib's `subplots`.

    Raises:
        ValueError: the title does not begin with the kind of its numbers.
    """
    if not title.startswith(KINDS):
        raise ValueError(f"{title!r}: a title begins with one of {', '.join(map(repr, KINDS))}")
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(looks()):
        made = Figure(figsize=(WIDTH, height), layout="constrained")
        panels: Any = made.subplots(1, columns, squeeze=False, **options)
        made.suptitle(title, fontsize=10, color=INK, x=0.01, ha="left")
        for axes in panels[0]:
            axes.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)
            axes.set_axisbelow(True)
    return made, panels[0]


def save(made: Any, path: Path) -> None:
    """Write a figure; an .svg has no ground, and the same bytes for the same numbers."""
    from matplotlib import rc_context

    path.parent.mkdir(parents=True, exist_ok=True)
    vector = path.suffix == ".svg"
    with rc_context(looks()):
        made.savefig(path, dpi=110, transparent=vector, metadata={"Date": None} if vector else None)
    if vector:  # matplotlib leaves blanks at the ends of lines
        lines = path.read_text(encoding="utf-8").splitlines()
        path.write_text("\n".join(line.rstrip() for line in lines) + "\n", encoding="utf-8")


def name_ends(axes: Any, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write each line's name behind its end (value, name, colour), one above the other where these lie together."""
    low, high = axes.get_ylim()
    least, at = 0.05 * (high - low), -float("inf")
    for value, name, colour in sorted(ends):
        at = max(value, at + least)
        axes.annotate(name, (1.01, at), xycoords=("axes fraction", "data"), color=colour, va="center", fontsize="small",
                      annotation_clip=False)
