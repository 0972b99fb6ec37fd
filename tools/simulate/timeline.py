"""The schedule as a picture: a lane per model, a box per batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from tools.simulate.meter import Step

WIDTH_IN = 14.0
LANE_IN = 0.7
FONT_PT = 7.0
COLOURS = "viridis"
MAX_LISTED = 4
"""Batches up to this size are labelled with the requests in them, if there is room."""


def draw_timeline(steps: Sequence[Step], models: Sequence[str], path: Path, *, title: str) -> None:
    """Draws the steps into a file whose suffix gives the format.

    Colour is the batch size; the label is the batch size, or the numbers of the requests (#3 #7) where they fit.
    """
    figure = Figure(figsize=(WIDTH_IN, 1.6 + LANE_IN * len(models)), layout="constrained")
    axes = figure.add_subplot()
    largest = max((len(step.requests) for step in steps), default=1)
    scale = Normalize(1, max(2, largest))
    if steps:
        begin_ns, end_ns = min(step.start_ns for step in steps), max(step.end_ns for step in steps)
        axes.set_xlim(begin_ns * 1e-6, end_ns * 1e-6)
        points_per_ns = 0.85 * WIDTH_IN * 72 / (end_ns - begin_ns)
        for step in steps:
            _draw(axes, step, models.index(step.model), scale, points_per_ns)
    axes.set_yticks(range(len(models)), models)
    axes.set_ylim(len(models) - 0.5, -0.5)
    axes.set_xlabel("simulated time (ms)")
    axes.set_title(title)
    mappable = ScalarMappable(scale, colormaps[COLOURS])
    figure.colorbar(mappable, ax=axes, label="batch size", pad=0.01, ticks=MaxNLocator(nbins=5, integer=True))
    figure.savefig(path, dpi=150)


def _draw(axes: Axes, step: Step, lane: int, scale: Normalize, points_per_ns: float) -> None:
    start_ms, length_ms = step.start_ns * 1e-6, (step.end_ns - step.start_ns) * 1e-6
    red, green, blue, _ = colormaps[COLOURS](scale(len(step.requests)))
    axes.broken_barh(
        [(start_ms, length_ms)], (lane - 0.36, 0.72), facecolors=(red, green, blue), edgecolor="white", linewidth=0.5
    )
    label = _label(step, (step.end_ns - step.start_ns) * points_per_ns)
    if label:
        dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
        colour = "white" if dark else "black"
        axes.text(start_ms + length_ms / 2, lane, label, ha="center", va="center", fontsize=FONT_PT, color=colour)


def _label(step: Step, room_pt: float) -> str:
    """The most that fits: requests one below the other, else the batch size, else nothing."""
    lines = [f"#{request}" for request in step.requests]
    size = str(len(step.requests))
    for text, widest in (("\n".join(lines), max(map(len, lines))), (size, len(size))):
        if widest * 0.65 * FONT_PT <= room_pt and text.count("\n") < MAX_LISTED:
            return text
    return ""
