"""How many CPU threads an engine may use: the cores this process is really granted, shared between engines.

Inside a container `os.cpu_count()` counts the host's cores. A quota of 2 cores on a 100-core host would then get 100
threads that are throttled against each other, and every engine process would do the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from tokenrouter.engines.torch import cgroup


def granted_cores(root: Path = cgroup.ROOT, membership: Path = cgroup.MEMBERSHIP) -> int:
    """Cores this process can use: the smaller of its CPU affinity and its cgroup's CPU quota, at least 1.

    Args:
        root: where the cgroup file systems are mounted.
        membership: the file that names the cgroups of this process.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    # A fraction of a core is rounded down: a thread more than the quota is throttled for a part of every period.
    return max(1, int(min([float(affinity), *_quotas(root, membership)])))


def default_threads(num_engines: int = 1) -> int:
    """Threads for each of `num_engines` engine processes on this host, so that together they use every core once."""
    return max(1, granted_cores() // max(1, num_engines))


def _quotas(root: Path, membership: Path) -> Iterator[float]:
    for version, folder in cgroup.folders("cpu", root, membership):
        quota = _quota_v2(folder) if version == 2 else _quota_v1(folder)
        if quota is not None:
            yield quota


def _quota_v2(folder: Path) -> float | None:
    """Reads `cpu.max`: `quota period` in microseconds, or `max period` for no limit."""
    fields = cgroup.read(folder / "cpu.max").split()
    if len(fields) != 2 or fields[0] == "max":
        return None
    return int(fields[0]) / int(fields[1])


def _quota_v1(folder: Path) -> float | None:
    """Reads `cpu.cfs_quota_us` (-1 for no limit) and `cpu.cfs_period_us`."""
    quota, period = cgroup.read(folder / "cpu.cfs_quota_us"), cgroup.read(folder / "cpu.cfs_period_us")
    if not quota or not period or int(quota) <= 0:
        return None
    return int(quota) / int(period)
