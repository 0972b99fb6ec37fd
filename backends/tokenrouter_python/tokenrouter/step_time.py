"""Step time of a batch size, from a few measured ones: one rule for emulated engines, the simulator and the chain."""

from __future__ import annotations

from collections.abc import Mapping


def step_time_ms(step_ms: float | Mapping[int, float], batch: int) -> float:
    """Milliseconds of a step with `batch` requests and one new token for each.

    Between two measured batch sizes the time is interpolated linearly. Below the smallest it is that of the smallest.
    Beyond the largest each further request costs what one cost between the last two measurements, but never less than
    nothing: a falling measurement is noise, not a trend. A table with one entry, and a plain number, are constant.

    Args:
        step_ms: the same at every batch size, or by measured batch size; not empty.
        batch: 1 or more.
    """
    if not isinstance(step_ms, Mapping):
        return step_ms
    sizes = sorted(step_ms)
    if batch <= sizes[0] or len(sizes) == 1:
        return step_ms[sizes[0]]
    upper = next((i for i, size in enumerate(sizes) if size >= batch), len(sizes) - 1)
    left, right = sizes[upper - 1], sizes[upper]
    slope = (step_ms[right] - step_ms[left]) / (right - left)
    if batch > right:
        return step_ms[right] + max(0.0, slope) * (batch - right)
    return step_ms[left] + slope * (batch - left)
