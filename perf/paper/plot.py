"""Figure 10 again: throughput by the large model's threshold, theory and measurement, the paper's and ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perf.paper.table import Row

_SERIES = (
    ("paper_theory", "paper, theory", {"color": "C7", "linestyle": "-", "marker": "_", "markersize": 14}),
    ("paper_measured", "paper, measured (A100)", {"color": "C3", "linestyle": ":", "marker": "s"}),
    ("theory", "ours, theory", {"color": "C0", "linestyle": "--", "marker": ""}),
    ("measured", "ours, emulated engines", {"color": "C0", "linestyle": "", "marker": "o"}),
)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Writes the image; one panel per number in flight."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    own = [row for row in rows if row["section"] == "figure_10"]
    numbers = sorted({int(row["in_flight"]) for row in own})
    figure, panels = pyplot.subplots(
        1, len(numbers), figsize=(3.4 * len(numbers), 3.4), layout="constrained", squeeze=False
    )
    for axes, n in zip(panels[0], numbers, strict=True):
        points = sorted((row for row in own if row["in_flight"] == str(n)), key=lambda row: row["thresholds"])
        x = [int(row["thresholds"].split()[-1]) for row in points]
        for column, label, style in _SERIES:
            axes.plot(x, [float(row[column]) for row in points], label=label, **style)
        axes.set_title(f"{n} in flight", fontsize=9)
        axes.set_xticks(x)
        axes.set_xlabel("threshold of the large model")
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("tokens/s")
    panels[0][0].legend(fontsize=7)
    figure.suptitle("Figure 10: R2R, steps of 6.0 and 27.9 ms (ours: emulated engines, real server)", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
