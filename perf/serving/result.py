"""Measured windows beside the Markov model's prediction, as the columns of a row."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import msgspec

from perf.serving.window import Window
from tools.dtmc.profile import Profile
from tools.tune.measure import predicted


def rates(windows: Sequence[Window]) -> dict[str, Any]:
    """Medians over the windows; `spread` is from the smallest to the largest, relative to the median."""
    found = [window.tokens_per_second for window in windows]
    return {
        "tokens_per_second": round(median(found), 2),
        "spread": round((max(found) - min(found)) / median(found), 4),
        "windows": len(windows),
        "window_s": round(median(window.seconds for window in windows), 2),
    }


def beside_model(
    profile: Profile, in_flight: int, thresholds: dict[str, int], windows: Sequence[Window], limit: float
) -> dict[str, Any]:
    """Differences are relative to the chain with these thresholds, efficiency to that with the best ones.

    `difference_as_drawn` is that of all windows together to the chain with the routing that they drew: without the luck
    of draws. Nothing where the chain does not apply.
    """
    measured = median(window.tokens_per_second for window in windows)
    in_all = sum(window.tokens for window in windows) / sum(window.seconds for window in windows)
    chain = predicted(profile, in_flight, thresholds)
    drawn = predicted(drawn_profile(profile, windows), in_flight, thresholds)
    return {
        "chain_tokens_per_second": chain and round(chain, 2),
        "difference": chain and round(measured / chain - 1.0, 4),
        "as_drawn_tokens_per_second": drawn and round(drawn, 2),
        "difference_as_drawn": drawn and round(in_all / drawn - 1.0, 4),
        "limit_tokens_per_second": round(limit, 2),
        "efficiency": round(measured / limit, 4),
    }


def figures(windows: Sequence[Window]) -> dict[str, float]:
    """Medians of what the windows have by model and process."""
    return {name: round(median(w.figures[name] for w in windows), 4) for name in windows[0].figures}


def drawn_profile(profile: Profile, windows: Sequence[Window]) -> Profile:
    """The profile with the routing that the windows drew."""
    routing = {}
    for name in profile.names:
        shares = {target: fmean(window.routes[name].get(target, 0.0) for window in windows) for target in profile.names}
        total = sum(shares.values())
        routing[name] = {target: share / total for target, share in shares.items()} if total else profile.routing[name]
    return msgspec.structs.replace(profile, routing=routing)
