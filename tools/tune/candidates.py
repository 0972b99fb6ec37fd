"""Settings that a profile and an agreement suggest: plain ones, and speculative ones where they may pay."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenrouter.speculation import Speculation
from tools.build_repository.build import built_deployment
from tools.build_repository.check import speculation_problems
from tools.build_repository.spec import BatchingSpec
from tools.build_repository.thresholds import batching_of
from tools.build_repository.tuning import with_speculation
from tools.dtmc.errors import ProfileError
from tools.dtmc.profile import Profile
from tools.dtmc.search import search_table
from tools.progress import Report


@dataclass(frozen=True)
class Settings:
    """What may be written into a repository.

    Attributes:
        speculation: None leaves it as it is.
        ahead: with speculation, the simulated tokens per second by number in flight.
    """

    batching: dict[str, BatchingSpec]
    speculation: Speculation | None = None
    ahead: dict[int, float] = field(default_factory=dict)

    def __str__(self) -> str:
        ahead = "" if self.speculation is None else f" and speculation of depth {self.speculation.depth}"
        return f"the new thresholds{ahead}"


def candidates(
    folder: Path, profile: Profile, inflight: int, agreement: float | None, report: Report
) -> Iterator[Settings]:
    """The plain settings; then the speculative ones, if they pay at every number in flight in the simulator.

    Nothing speculative where the repository's policy or an engine cannot go ahead, the profile is none of such a
    policy, or speculation is on already.
    """
    yield Settings(batching_of(profile, search_table(profile, inflight, report=report)))
    deployment = built_deployment(folder)
    if agreement is None or deployment.entry.speculation is not None:
        return
    if any(speculation_problems(with_speculation(deployment, Speculation()), folder)):
        return
    from tools.simulate.search import search_speculation_table  # with torch, which the chain does not need

    try:
        table = search_speculation_table(profile, inflight, agreement, report=report)
    except ProfileError:
        return
    if all(row.pays for row in table):
        ahead = {row.inflight: row.tokens_per_second for row in table}
        yield Settings(batching_of(profile, table), Speculation(table[-1].depth), ahead)
