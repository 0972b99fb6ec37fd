"""Memory, file descriptors and threads of a server's processes over time, and whether they stay flat."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

_KIB = 1 / 1024
_STATUS = {"VmRSS": "rss_mib", "RssAnon": "anonymous_mib", "RssFile": "file_mib", "RssShmem": "shared_mib"}
MEASURES = ("rss_mib", "anonymous_mib", "file_mib", "shared_mib", "pss_mib", "fds", "threads", "pool_threads")
JUDGED = ("rss_mib", "anonymous_mib", "fds", "threads")
"""What has to stay flat. Recorded only: proportional memory (pss_mib), which changes when other processes of the
machine map the same libraries, and gRPC's own pool of threads, which it sizes by demand and empties when idle."""

_POOL = ("event_engine", "grpc_global_tim", "timer_manager")

_SLACK = {"rss_mib": 0.5, "anonymous_mib": 0.5, "fds": 2.0, "threads": 2.0}


@dataclass(frozen=True)
class Sample:
    """One look at one process, `at_s` seconds after the start; values by name of `MEASURES`."""

    at_s: float
    process: str
    values: dict[str, float]

    def row(self) -> dict[str, str]:
        values = {measure: f"{self.values[measure]:.2f}".removesuffix(".00") for measure in MEASURES}
        return {"at_s": f"{self.at_s:.1f}", "process": self.process, **values}


def look(pid: int) -> dict[str, float]:
    """The `MEASURES` of a process, from /proc.

    Raises:
        OSError, psutil.Error: it has ended, or has no memory any more because it is about to.
    """
    values = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in _STATUS:
            values[_STATUS[name]] = float(rest.split()[0]) * _KIB
    if not values.keys() >= set(_STATUS.values()):
        raise ProcessLookupError(pid, "is ending")
    process = psutil.Process(pid)
    values["pss_mib"] = process.memory_full_info().pss / 2**20
    values["fds"] = float(process.num_fds())
    names = _thread_names(pid)
    values["pool_threads"] = float(sum(name in _POOL for name in names))
    values["threads"] = len(names) - values["pool_threads"]
    return values


def _thread_names(pid: int) -> list[str]:
    names = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            names.append((thread / "comm").read_text().strip())
    return names


class Watch:
    """Processes by name: a sample of each at every look; those that have `ended` are not looked at again."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._pids, self._began_s = dict(pids), time.monotonic()
        self.samples: list[Sample] = []
        self.ended: list[str] = []

    def look(self) -> dict[str, Sample]:
        newest = {}
        for name, pid in list(self._pids.items()):
            try:
                newest[name] = Sample(time.monotonic() - self._began_s, name, look(pid))
            except (OSError, psutil.Error):
                del self._pids[name]
                self.ended.append(name)
        self.samples += newest.values()
        return newest


@dataclass(frozen=True)
class Growth:
    """Whether one measure of one process stayed flat.

    Attributes:
        first: median of the first third of the time after the warm-up.
        last: median of the last third.
        slope_per_hour: of a straight line through all samples after the warm-up, in the measure's unit.
        flat: whether first and last differ by no more than the limit.
    """

    process: str
    measure: str
    first: float
    last: float
    slope_per_hour: float
    flat: bool

    @property
    def relative(self) -> float:
        """From the first to the last third."""
        return self.last / self.first - 1.0 if self.first else 0.0

    def __str__(self) -> str:
        return f"{self.process}: {self.measure} grew from {self.first:.1f} to {self.last:.1f} ({self.relative:+.1%})"

    def facts(self) -> dict[str, object]:
        rounded = {"first": round(self.first, 2), "last": round(self.last, 2), "relative": round(self.relative, 5)}
        return {**asdict(self), **rounded, "slope_per_hour": round(self.slope_per_hour, 2)}


def growth(samples: Sequence[Sample], *, warm_up_s: float, limit: float) -> list[Growth]:
    """One `Growth` per process and judged measure. Flat: up to the limit, or to 0.5 MiB, 2 descriptors or 2 threads.

    Raises:
        ValueError: fewer than six samples of a process after the warm-up.
    """
    late = [sample for sample in samples if sample.at_s >= warm_up_s]
    found = []
    for process in dict.fromkeys(sample.process for sample in samples):
        own = [sample for sample in late if sample.process == process]
        third = len(own) // 3
        if third < 2:
            raise ValueError(f"{process}: {len(own)} samples after the warm-up of {warm_up_s:g} s; run longer")
        for measure in JUDGED:
            values = np.array([sample.values[measure] for sample in own])
            first, last = float(np.median(values[:third])), float(np.median(values[-third:]))
            slope = float(np.polyfit([sample.at_s / 3600 for sample in own], values, 1)[0])
            flat = last - first <= max(limit * first, _SLACK[measure])
            found.append(Growth(process, measure, first, last, slope, flat))
    return found
