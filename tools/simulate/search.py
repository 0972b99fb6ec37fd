"""Thresholds and depth for speculative hand-off, by simulation: the exact chain does not know it.

One coordinate after the other: the second model's threshold, the first one's, the depth. The throughput is flat around
its maximum, so a geometric grid is enough; of every coordinate all values run shortly, and the best few longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tokenrouter.speculation import DEFAULT_DEPTH, Speculation
from tools.dtmc.profile import Profile
from tools.dtmc.search import SearchResult, search
from tools.load import stages
from tools.progress import Report, silent
from tools.simulate.run import simulate

DEPTHS = (2, 4, 8, 16)
ROUGH_TOKENS = 1_000
FINAL_TOKENS = 4_000
FINALISTS = 2
LEAST_GAIN = 1.05
"""Below this ratio it does not pay: the simulator knows no overhead."""

_GRID = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_SEED = 7


@dataclass(frozen=True, slots=True)
class SpeculativeResult:
    """Best settings for one number of requests in flight, beside plain routing with its own best thresholds.

    Attributes:
        depth: most guesses per request.
        standard_error: of `tokens_per_second`, which is simulated; the plain one is the chain's.
    """

    inflight: int
    agreement: float
    thresholds: dict[str, int]
    depth: int
    tokens_per_second: float
    standard_error: float
    plain_thresholds: dict[str, int]
    plain_tokens_per_second: float

    @property
    def ratio(self) -> float:
        """Speculative to plain throughput."""
        return self.tokens_per_second / self.plain_tokens_per_second

    @property
    def pays(self) -> bool:
        """Whether it is worth switching on."""
        return self.ratio >= LEAST_GAIN


@dataclass(frozen=True, slots=True)
class _Point:
    thresholds: tuple[int, ...]
    depth: int


def search_speculation(
    profile: Profile,
    inflight: int,
    agreement: float,
    *,
    depths: Sequence[int] = DEPTHS,
    plain: SearchResult | None = None,
    report: Report = silent,
) -> SpeculativeResult:
    """Finds thresholds and depth for this share of guesses that the second model writes too, in [0, 1].

    Thresholds are free of deadlock as in plain routing: sum(B - 1) < `inflight`.

    Args:
        plain: what `tools.dtmc.search.search` finds; it is searched for if not given.

    Raises:
        ProfileError: the first model cannot go ahead of the second with this profile.
        ValueError: a depth or the agreement is out of range.
    """
    plain = plain or search(profile, inflight, report=report)
    rates: dict[tuple[_Point, int], tuple[float, float]] = {}

    def rate(point: _Point, tokens: int) -> tuple[float, float]:
        if (point, tokens) not in rates:
            report(f"simulating {inflight} in flight, agreement {agreement:g}", 0.0)
            found = simulate(
                profile,
                inflight=inflight,
                thresholds=_named(profile, point),
                tokens=tokens,
                seed=_SEED,
                speculation=Speculation(point.depth),
                agreement=agreement,
            )
            rates[point, tokens] = found.tokens_per_second, found.standard_error
        return rates[point, tokens]

    def best(points: Sequence[_Point]) -> _Point:
        rough = sorted(points, key=lambda point: -rate(point, ROUGH_TOKENS)[0])
        return max(rough[:FINALISTS], key=lambda point: rate(point, FINAL_TOKENS)[0])

    start = _Point((1,) * len(profile.names), DEFAULT_DEPTH if DEFAULT_DEPTH in depths else depths[0])
    for place in reversed(range(len(profile.names))):
        start = best([_Point(b, start.depth) for b in _along(start.thresholds, place, profile, inflight)])
    start = best([_Point(start.thresholds, depth) for depth in depths])
    tokens_per_second, error = rate(start, FINAL_TOKENS)
    return SpeculativeResult(
        inflight,
        agreement,
        _named(profile, start),
        start.depth,
        tokens_per_second,
        error,
        plain.thresholds,
        plain.tokens_per_second,
    )


def search_speculation_table(
    profile: Profile, most: int, agreement: float, *, depths: Sequence[int] = DEPTHS, report: Report = silent
) -> list[SpeculativeResult]:
    """Best thresholds for 1, 2, 4, ... and `most` in flight, all with the depth that is best for `most`."""
    last = search_speculation(profile, most, agreement, depths=depths, report=report)
    fewer = [n for n in stages(most) if n < most]
    return [
        *(search_speculation(profile, n, agreement, depths=(last.depth,), report=report) for n in fewer),
        last,
    ]


def _named(profile: Profile, point: _Point) -> dict[str, int]:
    return dict(zip(profile.names, point.thresholds, strict=True))


def _along(thresholds: tuple[int, ...], place: int, profile: Profile, inflight: int) -> list[tuple[int, ...]]:
    """The vectors that differ in one place, and can neither deadlock nor exceed a model's largest batch."""
    room = inflight - sum(b - 1 for i, b in enumerate(thresholds) if i != place)
    largest = min(room, profile.models[profile.names[place]].max_batch or room)
    return [(*thresholds[:place], b, *thresholds[place + 1 :]) for b in _GRID if b <= max(1, largest)]
