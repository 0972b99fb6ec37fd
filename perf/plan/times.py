"""When the tokens of a request came, and what 99 % of them waited at most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Times = Mapping[int, Sequence[float]]
"""Number of a request, from 0 on -> when it was sent, then when its tokens came, in seconds on any clock."""


def typical_first_ms(times: Times) -> float:
    """Median time to the first token, in ms."""
    return float(np.median([1e3 * (each[1] - each[0]) for each in times.values()]))


def percentiles(times: Times, counted: range) -> dict[str, float]:
    """50th and 99th percentile of the time to the first token, and of the times between tokens, in ms.

    Args:
        times: of every request that is counted.
        counted: numbers of the requests.
    """
    firsts = [1e3 * (times[number][1] - times[number][0]) for number in counted]
    gaps = np.concatenate([1e3 * np.diff(times[number][1:]) for number in counted])
    found = {}
    for name, values in (("ttft", firsts), ("itl", gaps)):
        found[f"{name}_p50_ms"], found[f"{name}_p99_ms"] = map(float, np.percentile(values, (50, 99)))
    return found
