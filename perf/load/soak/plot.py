"""Memory over time, one panel per process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from perf.figure import drawn
from perf.load.soak.memory import Sample

_LINES = {"rss_mib": "resident", "anonymous_mib": "of it private (anonymous)", "shared_mib": "of it shared memory"}


def plot(samples: Sequence[Sample], path: Path, *, title: str, warm_up_s: float) -> None:
    """Draws the samples of all processes; the warm-up is shaded."""
    processes = list(dict.fromkeys(sample.process for sample in samples))
    with drawn(path, 1, len(processes), size=(3.2 * len(processes), 3.2), title=title) as grid:
        for axes, process in zip(grid[0], processes, strict=True):
            own = [sample for sample in samples if sample.process == process]
            minutes = [sample.at_s / 60 for sample in own]
            for measure, label in _LINES.items():
                axes.plot(minutes, [sample.values[measure] for sample in own], label=label, linewidth=1.2)
            axes.axvspan(0, warm_up_s / 60, color="0.92")
            axes.set_ylim(bottom=0)
            axes.set_title(process, fontsize=9)
            axes.set_xlabel("minutes")
        grid[0][0].set_ylabel("MiB")
        grid[0][0].legend(fontsize=7, loc="center right")
