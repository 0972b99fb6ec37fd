"""Plots: a grid of panels that becomes an image."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def drawn(path: Path, rows: int, columns: int, *, size: tuple[float, float], title: str) -> Iterator[Any]:
    """The panels, as grid[row][column]; `size` is of all of them, in inches. Writes the image at the end."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    yield grid
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
