"""Figure 10 again: throughput by the large model's threshold, theory and measurement, the paper's and ours."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perf.figure import drawn
from perf.paper.table import Text

_SERIES = (
    ("paper_theory", "paper, theory", {"color": "C7", "linestyle": "-", "marker": "_", "markersize": 14}),
    ("paper_measured", "paper, measured (A100)", {"color": "C3", "linestyle": ":", "marker": "s"}),
    ("theory", "ours, theory", {"color": "C0", "linestyle": "--", "marker": ""}),
    ("measured", "ours, emulated engines", {"color": "C0", "linestyle": "", "marker": "o"}),
)


def plot(rows: Sequence[Text], path: Path) -> None:
    """Writes the image; one panel per number in flight."""
    numbers = sorted({int(row["in_flight"]) for row in rows})
    title = "Figure 10: R2R, steps of 6.0 and 27.9 ms (ours: emulated engines, real server)"
    with drawn(path, 1, len(numbers), size=(3.4 * len(numbers), 3.4), title=title) as (panels,):
        for axes, n in zip(panels, numbers, strict=True):
            points = sorted((row for row in rows if row["in_flight"] == str(n)), key=lambda row: row["thresholds"])
            x = [int(row["thresholds"].split()[-1]) for row in points]
            for column, label, style in _SERIES:
                axes.plot(x, [float(row[column]) for row in points], label=label, **style)
            axes.set_title(f"{n} in flight", fontsize=9)
            axes.set_xticks(x)
            axes.set_xlabel("threshold of the large model")
        panels[0].set_ylabel("tokens/s")
        panels[0].legend(fontsize=7)
