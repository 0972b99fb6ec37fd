"""What is reproduced: one cell per number of requests in flight and system, with what the paper says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from perf.baselines.limits import throughput
from perf.baselines.turns import step_sync
from perf.paper.reference import Paper
from tools.dtmc.profile import Profile, load_profile
from tools.dtmc.search import SearchResult, search
from tools.dtmc.solve import solve

PROFILES = Path(__file__).resolve().parents[2] / "configs" / "profiles"
FILES = {"r2r": "r2r_qwen3_0.6b_32b.yaml", "me": "me_qwen3_0.6b_8b_32b.yaml"}

Key = tuple[str, tuple[int, ...], int]
"""What is measured: policy, thresholds, number in flight. Sections share it."""

EAGER, BEST, BARRIER = "eager", "best thresholds", "barrier per step"
ROWS = {BEST: "full", EAGER: "no delayed batching", BARRIER: "no asynchronous execution"}
"""Rows of Table 6 by what we call the system."""


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        section: see `SECTIONS`.
        system: how the table calls it.
        policy: also names the profile, see `FILES`.
        in_flight: N.
        thresholds: by model, in the profile's order; empty for the barrier, which runs in one process, without server.
        paper_theory: what the paper's model gives, or None.
        paper_measured: what the paper measured, or None.
    """

    section: str
    system: str
    policy: str
    in_flight: int
    thresholds: tuple[int, ...]
    paper_theory: float | None = None
    paper_measured: float | None = None

    @property
    def key(self) -> Key:
        return self.policy, self.thresholds, self.in_flight

    def theory(self) -> float:
        """Tokens per second without any overhead: the Markov model, or its counterpart with a barrier."""
        profile = profile_of(self.policy)
        if not self.thresholds:
            return throughput(profile, self.in_flight, step_sync)
        found = searched(self.policy, self.in_flight)
        # The eager chain of three models can be too large to solve; the search then estimates it to 0.1 %.
        if self.thresholds == eager(self.policy):
            return found.eager_tokens_per_second
        if self.thresholds == best(self.policy, self.in_flight):
            return found.tokens_per_second
        named = dict(zip(profile.names, self.thresholds, strict=True))
        return solve(profile, self.in_flight, named).tokens_per_second


@cache
def profile_of(policy: str) -> Profile:
    return load_profile(PROFILES / FILES[policy])


@cache
def searched(policy: str, in_flight: int) -> SearchResult:
    """The Markov model's best thresholds and eager batching."""
    return search(profile_of(policy), in_flight)


def best(policy: str, in_flight: int) -> tuple[int, ...]:
    return tuple(searched(policy, in_flight).thresholds.values())


def eager(policy: str) -> tuple[int, ...]:
    return (1,) * len(profile_of(policy).names)


def figure_10(paper: Paper, quick: bool) -> list[Cell]:
    """Throughput by the large model's threshold."""
    cells = []
    for row in paper.tables["figure_10"].rows:
        n, threshold = int(row["in_flight"]), int(row["threshold"])
        if not quick or n != 3:
            published = float(row["theory"]), float(row["measured"])
            cells.append(Cell("figure_10", f"threshold {threshold}", "r2r", n, (1, threshold), *published))
    return cells


def table_6(paper: Paper, quick: bool) -> list[Cell]:
    """What delay and asynchronous execution bring: full, without delay, and also without asynchronous execution."""
    cells = []
    for n in (4,) if quick else (1, 4, 8):
        for system, row in ROWS.items():
            thresholds = {BEST: best("r2r", n), EAGER: eager("r2r"), BARRIER: ()}[system]
            measured = paper.tables["table_6"].number(f"n{n}", system=row)
            cells.append(Cell("table_6", system, "r2r", n, thresholds, None, measured))
    return cells


def scaling(paper: Paper, quick: bool) -> list[Cell]:
    """From 1 to 16 in flight with the best thresholds; Table 6 has 1, 4 and 8."""
    table = paper.tables["table_6"]
    published = {n: table.number(f"n{n}", system=ROWS[BEST]) for n in (1, 4, 8)}
    found = (1, 16) if quick else (1, 2, 4, 8, 16)
    return [Cell("scaling", BEST, "r2r", n, best("r2r", n), None, published.get(n)) for n in found]


def three_models(paper: Paper, quick: bool) -> list[Cell]:
    """ME with three models; the paper has bars only."""
    cells = []
    for n in (4,) if quick else (1, 4, 8):
        for system, thresholds in ((EAGER, eager("me")), (BEST, best("me", n))):
            if n > 1 or system == EAGER:
                cells.append(Cell("three_models", system, "me", n, thresholds))
    return cells


SECTIONS: Mapping[str, Callable[[Paper, bool], list[Cell]]] = {
    "figure_10": figure_10,
    "table_6": table_6,
    "scaling": scaling,
    "three_models": three_models,
}
