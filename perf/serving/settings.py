"""Settings of thresholds that are measured, by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from perf.emulated.deployment import EAGER, Thresholds
from tools.dtmc.network import parse_thresholds
from tools.dtmc.profile import Profile
from tools.dtmc.search import SearchResult, search


class Best:
    """The chain's best thresholds by number in flight, searched once each."""

    def __init__(self, profile: Profile, report: Callable[[str, float], None] = lambda stage, share: None) -> None:
        self._profile = profile
        self._report = report
        self._found: dict[int, SearchResult] = {}

    def at(self, in_flight: int) -> SearchResult:
        """The search's result."""
        if in_flight not in self._found:
            self._found[in_flight] = search(self._profile, in_flight, report=self._report)
        return self._found[in_flight]


def setting(name: str, in_flight: Sequence[int], best: Best) -> Thresholds:
    """``eager``, ``best`` (a table of the best at the given numbers in flight), or thresholds like small=1,large=3.

    Raises:
        ThresholdError: none of these.
    """
    if name == "eager":
        return EAGER
    if name == "best":
        return Thresholds("best", {n: best.at(n).thresholds for n in in_flight})
    return Thresholds(name, {0: parse_thresholds(name)})


def tuned_for(most: int, best: Best) -> list[Thresholds]:
    """A table for 1..`most` in flight, and the thresholds for `most` at any number in flight."""
    return [
        Thresholds(f"table 1..{most}", {n: best.at(n).thresholds for n in range(1, most + 1)}),
        Thresholds(f"fixed for {most}", {0: best.at(most).thresholds}),
    ]
