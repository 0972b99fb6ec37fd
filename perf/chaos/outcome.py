"""What a run of chaos found, and what of it must not be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from perf.chaos.absences import Absence
from perf.chaos.service import ENTRY, FRONT, SERVER
from perf.load.known import Verdict
from perf.load.known_loop import Attempt, Judged
from perf.load.soak.memory import Growth, Sample

STALL_S = 0.05
RECOVERY_S: Mapping[str, float] = {
    "kill small": 10.0,
    "kill large": 10.0,
    f"kill {ENTRY}": 15.0,
    f"kill {SERVER}": 15.0,
}
"""Bounds; the entry model comes back within 5 s where it is loaded again, within 15 s where everything is restarted."""
_AROUND_S = 1.0
_TAKEN_ALONG_S = 40.0
"""A model's process that dies while it speaks with Triton can take tritonserver along, which gives up its locks after
ten seconds. One that stands still for a second counts as dead for Triton, and can end by that when it goes on."""


@dataclass(frozen=True)
class Event:
    """Something that happened; moments are seconds on `time.perf_counter`.

    Attributes:
        kind: see `events.EVENTS`.
        ended_s: when it was done.
        recovery_s: from its beginning to the first right answer that needs what was hit; None if there was none.
        stall_s: longest gap between two messages of the probing streams that touches it.
        failures: requests that were part of it and were not answered.
    """

    kind: str
    began_s: float
    ended_s: float
    recovery_s: float | None
    stall_s: float
    failures: Sequence[str] = ()

    @property
    def over_s(self) -> float:
        """When everything was well again."""
        return self.ended_s if self.recovery_s is None else max(self.ended_s, self.began_s + self.recovery_s)


@dataclass
class Outcome:
    """Everything; gauges, processes and files that are left are `leaks`.

    Attributes:
        calm_s: longest gap of the probing streams in every pause between events.
        restarts: by process, as the supervisor counted.
        absences: of processes, as the supervisor saw them.
    """

    seed: int
    in_flight: int
    began_s: float = 0.0
    seconds: float = 0.0
    judged: Judged = field(default_factory=Judged)
    events: list[Event] = field(default_factory=list)
    calm_s: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    growth: list[Growth] = field(default_factory=list)
    leaks: list[str] = field(default_factory=list)
    restarts: dict[str, int] = field(default_factory=dict)
    absences: list[Absence] = field(default_factory=list)
    exit_code: int = 0

    def unexcused(self) -> list[Attempt]:
        """Requests that failed although neither the entry model nor tritonserver died or stood still.

        Over `/v1` its own server excuses them too.
        """
        return [
            other
            for other in self.judged.others
            if other.verdict is Verdict.FAILED
            and not any(_excuses(absence, other) for absence in self.absences)
            and not any(_excused_by_stop(event, other) for event in self.events)
        ]

    @property
    def stall_s(self) -> float:
        """The longest beside malformed and oversized requests."""
        return max((event.stall_s for event in self.events if _attacks(event)), default=0.0)

    def recoveries(self) -> dict[str, list[float]]:
        """Seconds by kind, of those that were followed by a right answer."""
        found: dict[str, list[float]] = {}
        for event in self.events:
            if event.recovery_s is not None:
                found.setdefault(event.kind, []).append(event.recovery_s)
        return found

    def broken(self) -> list[str]:
        """What no machine excuses, however busy."""
        wrong = (Verdict.WRONG, Verdict.HUNG)
        found = [_told(other) for other in self.judged.others if other.verdict in wrong]
        found += [f"failed beside no death: {_told(other)}" for other in self.unexcused()]
        found += [
            f"{event.kind}: {failure}"
            for event in self.events
            for failure in event.failures
            if not any(_excuses_event(absence, event) for absence in self.absences)
        ]
        found += [
            f"{event.kind}: no right answer followed" for event in self.events if _hits(event) and not event.recovery_s
        ]
        found += self._died_by_themselves()
        return [*found, *self.leaks, *([f"the launcher's exit code is {self.exit_code}"] if self.exit_code else [])]

    def _died_by_themselves(self) -> list[str]:
        return [
            f"{absence.name} died after {absence.from_s - self.began_s:.0f} s, and nobody had killed it"
            for absence in self.absences
            if not any(_explains(event, absence) for event in self.events)
        ]

    @property
    def taken_along(self) -> int:
        """Deaths that no kill of theirs explains, but what happened to a model's process, see `_TAKEN_ALONG_S`."""
        return sum(
            not any(_kills(event, absence) for event in self.events)
            and any(_explains(event, absence) for event in self.events)
            for absence in self.absences
        )

    def slow(self) -> list[str]:
        """Bounds on time, and flat memory."""
        found = [
            f"{event.kind}: back after {event.recovery_s:.1f} s, more than {RECOVERY_S[event.kind]:g} s"
            for event in self.events
            if event.kind in RECOVERY_S and (event.recovery_s or 0.0) > RECOVERY_S[event.kind]
        ]
        if self.stall_s > STALL_S:
            found.append(
                f"a stream stalled for {self.stall_s:.3f} s beside malformed requests, more than {STALL_S:g} s"
            )
        return found + [str(growth) for growth in self.growth if not growth.flat]

    def facts(self) -> dict[str, Any]:
        """For JSON."""
        verdicts = {verdict.value: self.judged.verdicts[verdict] for verdict in Verdict}
        attacks = [event.stall_s for event in self.events if _attacks(event)]
        return {
            "seed": self.seed,
            "in_flight": self.in_flight,
            "seconds": round(self.seconds, 1),
            "requests": self.judged.requests,
            **verdicts,
            "failed_beside_no_death": len(self.unexcused()),
            "tokens": self.judged.tokens,
            "longest_response_seconds": round(self.judged.longest_s, 3),
            "by_way": {
                f"{way}: {verdict.value}": number
                for (way, verdict), number in sorted_counts(self.judged.by_way.items())
            },
            "events": counted(event.kind for event in self.events),
            "restarts": self.restarts,
            "taken_along": self.taken_along,
            "recovery_seconds": {kind: _spread(values) for kind, values in sorted(self.recoveries().items())},
            "longest_stall_seconds": round(self.stall_s, 4),
            "stall_seconds_beside_attacks": _spread(attacks),
            "stall_seconds_in_pauses": _spread(self.calm_s),
            "leaks": self.leaks,
            "growth": [growth.facts() for growth in self.growth],
            "exit_code": self.exit_code,
            "broken": self.broken(),
            "over_bounds": self.slow(),
        }


def sorted_counts(items: Iterable[tuple[tuple[str, Verdict], int]]) -> list[tuple[tuple[str, Verdict], int]]:
    return sorted(items, key=lambda item: (item[0][0], item[0][1].value))


def counted(kinds: Iterable[str]) -> dict[str, int]:
    """Number by kind."""
    numbers: dict[str, int] = {}
    for kind in sorted(kinds):
        numbers[kind] = numbers.get(kind, 0) + 1
    return numbers


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {"count": 0}
    return {"count": len(values), "p50": round(median(values), 3), "max": round(max(values), 3)}


def _attacks(event: Event) -> bool:
    return event.kind.startswith("malformed") or event.kind == "oversized"


def _hits(event: Event) -> bool:
    return event.kind.startswith(("kill", "stop", "reload"))


def _excuses(absence: Absence, other: Attempt) -> bool:
    excused = absence.name in (ENTRY, SERVER) or (absence.name == FRONT and other.way.startswith("/v1"))
    return excused and _touches(other, absence.from_s, absence.to_s)


def _excuses_event(absence: Absence, event: Event) -> bool:
    """Whether what belonged to an event found tritonserver or the entry model dead, which it need not have killed."""
    return absence.name in (ENTRY, SERVER) and _touches(event, absence.from_s, absence.to_s)


def _excused_by_stop(event: Event, other: Attempt) -> bool:
    stopped = event.kind in (f"stop {ENTRY}", f"stop {SERVER}")
    return stopped and _touches(other, event.began_s, event.over_s)


def _touches(other: Attempt | Event, from_s: float, to_s: float) -> bool:
    return other.began_s <= to_s + _AROUND_S and other.ended_s >= from_s - _AROUND_S


def _kills(event: Event, absence: Absence) -> bool:
    killed = event.kind in (f"kill {absence.name}", f"kill {SERVER}")
    return killed and event.began_s - _AROUND_S <= absence.from_s <= event.over_s + _AROUND_S


def _explains(event: Event, absence: Absence) -> bool:
    if _kills(event, absence):
        return True
    what, _, whom = event.kind.partition(" ")
    along = (what in ("kill", "stop") and whom != FRONT and absence.name == SERVER) or (
        event.kind == f"stop {ENTRY}" and absence.name == ENTRY
    )
    return along and 0.0 <= absence.from_s - event.began_s + _AROUND_S <= _TAKEN_ALONG_S


def _told(other: Attempt) -> str:
    return f"{other.way}, policy {other.policy or 'default'}: {other.verdict.value}: {other.error[:200]}"
