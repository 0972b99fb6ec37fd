"""What a subserver asks of whatever runs its visits; two implementations, one per kind of engine.

`stepping.SteppingRunner` steps the engine: a batch of delayed batching is one step. `submitting.SubmittingRunner` hands
visits to an engine that owns its loop: a batch of delayed batching is what is submitted together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tokenrouter.batcher import Batch, WaitUntil
from tokenrouter.errors import RouterError
from tokenrouter.messages import Outcome, ReportRow
from tokenrouter.subserver.sequence import ModelSequence

Key: TypeAlias = tuple[int, int]
"""(peer, request): orchestrators number their requests independently."""

Rows: TypeAlias = list[tuple[Key, ReportRow]]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One engine step: which requests take part with how many new tokens, in the order of the batch."""

    batch: Batch[Key]
    rows: tuple[tuple[Key, int], ...]


@dataclass(frozen=True, slots=True)
class SubmitPlan:
    """One turn beside an engine that owns its loop: takes its news, and submits `batch` if there is one."""

    batch: Batch[Key] | None


Plan: TypeAlias = StepPlan | SubmitPlan


class Runner(Protocol):
    """Runs visits. Sequences are shared with the subserver, which drops those that end or fail."""

    @property
    def idle_since_ns(self) -> int:
        """An arrival that left elsewhere before this time had to wait for the end of a step."""
        ...

    def admit(self, sequence: ModelSequence) -> None:
        """Refuses a request that can never be served here, before it gets KV.

        Raises:
            RouterError: says why, and what to do instead.
        """
        ...

    def arrive(self, key: Key, sequence: ModelSequence, *, now_ns: int) -> None:
        """A visit begins; tokens and KV length are up to date."""
        ...

    def leave(self, key: Key) -> None:
        """Whatever runs or waits of this request is over; unknown keys are ignored."""
        ...

    def listen(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when an engine has news."""
        ...

    def poll(self, *, in_flight: int, now_ns: int) -> Plan | WaitUntil | None:
        """What to do now. Changes nothing."""
        ...

    def run(self, plan: Plan) -> tuple[Rows, int]:
        """Executes a plan; what became of requests, in order, and the time (ns) at which that was known."""
        ...


def failed(request: int, visit: int, exc: Exception) -> ReportRow:
    """The row of a request that failed."""
    slug = exc.slug if isinstance(exc, RouterError) else "engine_failed"
    text = str(exc) if isinstance(exc, RouterError) else f"{type(exc).__name__}: {exc}"
    return ReportRow(request, visit, Outcome.FAILED, [], error=(slug, text))
