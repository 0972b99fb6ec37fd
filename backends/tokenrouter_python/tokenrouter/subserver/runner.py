"""What a subserver asks of whatever runs its visits; one implementation per kind of engine.

`stepped.SteppingRunner` steps the engine: a batch of delayed batching is one step. `submitted.SubmittingRunner` hands
visits to an engine that owns its loop: a batch of delayed batching is what is submitted together.

A sequence is its runner's from `arrive` until `leave`, or until `Plan.run` tells of it with another outcome than STAY;
the subserver touches only those that are away.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, Protocol, TypeAlias, TypeVar

from tokenrouter.batcher import Batching, DelayedBatcher, Reason, WaitUntil
from tokenrouter.engines.base import KvEngine, nothing
from tokenrouter.errors import InvalidRequest, RouterError
from tokenrouter.messages import Outcome, ReportRow
from tokenrouter.pulse import Pulse
from tokenrouter.statistics import SubserverStatistics
from tokenrouter.subserver.sequence import ModelSequence
from tokenrouter.timeline.steps import Member, Step, StepLog

E_co = TypeVar("E_co", bound=KvEngine, covariant=True)

Rows: TypeAlias = list[tuple[ModelSequence, ReportRow]]


class Plan(Protocol):
    """What a model can do now."""

    def run(self) -> tuple[Rows, int]:
        """Does it. What became of requests, in order, and the time (ns) at which that was known."""
        ...


class Runner(ABC, Generic[E_co]):
    """Runs visits on an engine, in batches that delayed batching forms.

    Args:
        engine: whose lease of KV a sequence holds while it is open.
        batching: of the model.
        clock_ns: CLOCK_MONOTONIC in ns; only used for statistics and the times of reports.

    Class attributes:
        speculates: whether sequences can go ahead here, and guesses of others be checked.

    Attributes:
        batching: as given.
        pulse: of the loop that runs the visits; steps of the engine do not count as its work.
        explaining: how many open requests want to be explained.
        idle_since_ns: an arrival that left elsewhere before this time had to wait for the end of a step.
        step_log: keeps every step; None = nobody wants them. May be set from any thread.
    """

    speculates: ClassVar[bool] = False

    def __init__(self, engine: E_co, batching: Batching, *, clock_ns: Callable[[], int]) -> None:
        self.engine = engine
        self.batching = batching
        self.statistics = SubserverStatistics()
        self.pulse = Pulse()
        self.explaining = 0
        self.idle_since_ns = 0
        self.step_log: StepLog | None = None
        self._waiting: DelayedBatcher[ModelSequence] = DelayedBatcher(batching, max_batch=engine.info.max_batch)
        self._meanwhile: Callable[[], None] = nothing
        self._clock_ns = clock_ns

    def threshold(self, in_flight: int) -> int:
        """B(n), never more than a batch can hold."""
        return self._waiting.threshold(in_flight)

    def admit(self, sequence: ModelSequence, *, kv_tokens: int) -> None:
        """Leases KV for at most `kv_tokens` tokens.

        Raises:
            RouterError: says why not, and what to do instead.
        """
        sequence.handle = self.engine.open(kv_tokens=kv_tokens, prompt_tokens=sequence.prompt_tokens)
        self.explaining += sequence.explain

    def check_tokens(self, tokens: Sequence[int], end: int, lease: int) -> None:
        """Refuses what the engine could not run, which would fail all requests of the step.

        Raises:
            InvalidRequest: a token is none of the model's, or the last one's position, `end`, lies behind the lease.
        """
        vocab_size = self.engine.info.vocab_size
        if max(tokens, default=0) >= vocab_size:
            raise InvalidRequest(f"token id {max(tokens)}; this model's lie in [0, {vocab_size})")
        if end > lease:
            raise InvalidRequest(f"{end} tokens; KV is leased for {lease}")

    def release(self, sequence: ModelSequence) -> None:
        """The request is over here, whether it is away or not."""
        self.leave(sequence)
        self.explaining -= sequence.explain
        self.engine.close(sequence.handle)

    def listen(self, wake: Callable[[], None]) -> None:
        """`wake` is called, from any thread, when the engine has news. A stepped engine never has."""

    def overlap(self, meanwhile: Callable[[], None]) -> bool:
        """Whether `meanwhile` will be called in every step that we run, while the engine computes."""
        return False

    def _logged(self, members: list[Member], reason: Reason, start_ns: int, *, running: int) -> Step:
        """A step that starts; to be kept once it is over."""
        in_flight, threshold = self._waiting.in_force
        return Step(start_ns, start_ns, reason.value, in_flight, threshold, 0, running, members)

    def _member(self, sequence: ModelSequence, tokens: int) -> Member:
        """A waiting request's part in a step."""
        since_ns = self._waiting.ready_since(sequence)
        return Member(sequence.peer, sequence.request, sequence.visit, tokens, since_ns)

    @abstractmethod
    def arrive(self, sequence: ModelSequence, *, now_ns: int) -> None:
        """A visit begins; tokens and KV length are up to date."""

    @abstractmethod
    def leave(self, sequence: ModelSequence) -> None:
        """The visit is over; nothing happens if the sequence is away."""

    def settled(self, sequence: ModelSequence, *, now_ns: int) -> None:
        """Guesses of a sequence that is ahead here were checked, and it may be ready again, or none any more."""

    @abstractmethod
    def poll(self, *, in_flight: int, now_ns: int) -> Plan | WaitUntil | None:
        """What to do now. Changes nothing."""


def failed(request: int, visit: int, exc: Exception) -> ReportRow:
    """The row of a request that failed."""
    slug = exc.slug if isinstance(exc, RouterError) else "engine_failed"
    text = str(exc) if isinstance(exc, RouterError) else f"{type(exc).__name__}: {exc}"
    return ReportRow(request, visit, Outcome.FAILED, [], error=(slug, text))
