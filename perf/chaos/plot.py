"""A run over time: right answers, recoveries, memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from perf.chaos.outcome import Outcome
from perf.figure import drawn

_BIN_S = 10.0


def plot(outcome: Outcome, path: Path) -> None:
    """Writes the image: right answers per second with every kill marked; recovery by kind; resident memory."""
    title = f"{outcome.seconds / 60:.0f} minutes of chaos, {outcome.in_flight} requests in flight, seed {outcome.seed}"
    with drawn(path, 1, 3, size=(13.0, 3.8), title=title) as ((rate, recovery, memory),):
        _rate(rate, outcome)
        kinds = sorted(outcome.recoveries().items(), reverse=True)
        for row, (_, values) in enumerate(kinds):
            recovery.plot(values, [row] * len(values), "o", color="C0", alpha=0.5, markersize=4)
        recovery.set_yticks(range(len(kinds)), [kind for kind, _ in kinds], fontsize=7)
        recovery.set_xlabel("seconds to the first right answer")
        for name in dict.fromkeys(sample.process for sample in outcome.samples):
            own = [sample for sample in outcome.samples if sample.process == name]
            memory.plot([each.at_s / 60 for each in own], [each.values["rss_mib"] for each in own], label=name, lw=0.9)
        memory.set_xlabel("minutes")
        memory.set_ylabel("resident MiB")
        memory.legend(fontsize=7)


def _rate(axes: object, outcome: Outcome) -> None:
    moments = np.array(outcome.judged.moments) - outcome.began_s
    counts, edges = np.histogram(moments, np.arange(0.0, outcome.seconds + _BIN_S, _BIN_S))
    axes.plot(edges[:-1] / 60, counts / _BIN_S, lw=1.0, label="right answers per second")  # type: ignore[attr-defined]
    for event in outcome.events:
        if event.kind in ("kill tokenrouter", "kill tritonserver"):
            color = "C3" if event.kind == "kill tritonserver" else "C1"
            axes.axvline((event.began_s - outcome.began_s) / 60, color=color, lw=0.6, alpha=0.6)  # type: ignore[attr-defined]
    axes.set_xlabel("minutes (lines: the entry model or tritonserver is killed)")  # type: ignore[attr-defined]
    axes.set_ylabel("right answers per second")  # type: ignore[attr-defined]
