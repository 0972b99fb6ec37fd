"""One run of chaos: a closed loop of known answers, and one event after the other."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perf.chaos.absences import absences
from perf.chaos.events import EVENTS, in_order
from perf.chaos.outcome import Event, Outcome
from perf.chaos.sampling import Sampler
from perf.chaos.service import ENTRY, FRONT, SERVER, Service
from perf.load.known import KnownAnswer, Verdict, judged, known_answers
from perf.load.known_loop import KnownLoop
from perf.load.soak.memory import growth
from perf.load.ways import over_grpc, over_v1
from perf.stall.prober import Prober
from tokenrouter.metrics_page import still_busy
from tools.load import read_prompts
from tools.progress import Report

LONG: Mapping[str, Any] = {"max_tokens": 800, "end_id": 257, "policy": "single"}
"""Further fields of the probing streams: the demo pair never writes this end."""
_PROMPT = "Start 1: +1 ="
_PROMPTS = 8
_PROBE_S = 5.0
_GIVE_UP_S = 180.0
_LOOK_S = 0.02
_PAUSE_S = (1.0, 4.0)
_WARM_UP = 0.2


@dataclass(frozen=True)
class Known:
    """Answers from the offline engine: those that clients ask for, and a short one by the process that it needs."""

    answers: Sequence[KnownAnswer]
    probes: Mapping[str, KnownAnswer]

    @classmethod
    def of(cls, repository: Path) -> Known:
        """Of a repository like the demo's."""
        policies = [("", {}), ("single", {"model": "small"}), ("single", {"model": "large"})]
        short = known_answers(repository, [_PROMPT], max_tokens=8, policies=policies)
        default, small, large = short
        return cls(
            known_answers(repository, read_prompts()[:_PROMPTS]),
            {"small": small, "large": large, ENTRY: default, SERVER: default, FRONT: default},
        )


def chaos(
    service: Service,
    known: Known,
    *,
    seconds: float,
    in_flight: int,
    seed: int,
    report: Report,
    patience_s: float = 60.0,
) -> Outcome:
    """Runs events for so long; afterwards the deployment has ended. What takes longer than `patience_s` has hung.

    The calling thread, and with it all clients but the probing streams, runs after the servers from then on: clients
    belong on other machines.
    """
    outcome = Outcome(seed, in_flight, began_s=time.perf_counter())
    sampler = Sampler(service)
    loop = KnownLoop(service.to, known.answers, in_flight, seed=seed, patience_s=patience_s)
    with sampler, Prober(service.grpc_url, prompt=_PROMPT, **LONG) as prober:
        _run_after_servers()
        with loop:
            _happen(service, known, outcome, prober, seconds, report)
    outcome.judged = loop.judged
    outcome.seconds = time.perf_counter() - outcome.began_s
    _finish(service, outcome, sampler)
    return outcome


def _run_after_servers() -> None:
    """This thread, and those that it starts, have what cores the servers leave."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def _happen(service: Service, known: Known, outcome: Outcome, prober: Prober, seconds: float, report: Report) -> None:
    draw, until = random.Random(outcome.seed), outcome.began_s + seconds
    order: list[str] = []
    while (now_s := time.perf_counter()) < until:
        order = order or in_order(draw.randrange(2**32))
        kind = order.pop()
        report(f"{len(outcome.events)} events, now {kind}", (now_s - outcome.began_s) / seconds)
        event = _event(kind, service, known, prober, draw)
        outcome.events.append(event)
        paused_s = time.perf_counter()
        time.sleep(draw.uniform(*_PAUSE_S))
        if not event.kind.startswith(("kill", "reload")):  # a process that has just begun still warms up
            outcome.calm_s.append(max(prober.gaps(paused_s, time.perf_counter()), default=0.0))


def _event(kind: str, service: Service, known: Known, prober: Prober, draw: random.Random) -> Event:
    waited_s = time.perf_counter()
    while not service.ready() and time.perf_counter() < waited_s + _GIVE_UP_S:
        time.sleep(_LOOK_S)  # something else died; who brings it back counts it
    began_s = time.perf_counter()
    try:
        failures = EVENTS[kind](service, draw)
    except (OSError, KeyError) as exc:  # an operator's call that was refused, or a process that is away
        failures = [f"{type(exc).__name__}: {exc}"]
    ended_s = time.perf_counter()
    _, _, hit = kind.partition(" ")
    recovery_s = _recovery(service, known, hit, began_s) if hit in known.probes else None
    stall_s = max(prober.gaps(began_s, ended_s), default=0.0)
    return Event(kind, began_s, ended_s, recovery_s, stall_s, failures)


def _recovery(service: Service, known: Known, hit: str, began_s: float) -> float | None:
    """Seconds until a right answer that needs this process, and until the supervisor calls everything ready."""
    probe, way = known.probes[hit], over_v1 if hit == FRONT else over_grpc
    answered: float | None = None
    while time.perf_counter() < began_s + _GIVE_UP_S:
        if answered is None:
            reply = way(service.to, probe, _PROBE_S, False)
            if judged(reply, probe) is Verdict.RIGHT:
                answered = time.perf_counter() - began_s
        elif service.ready():
            return answered
        time.sleep(_LOOK_S)
    return None


def _finish(service: Service, outcome: Outcome, sampler: Sampler) -> None:
    """What is held, what grew, and what is left when everything has ended."""
    outcome.leaks += [f"{gauge} is {value:g} at the end" for gauge, value in still_busy(service.metrics_url).items()]
    outcome.leaks += sampler.leaks()
    outcome.restarts, outcome.absences = service.restarts(), absences(service.log_text())
    outcome.samples = sampler.samples
    service.stop()
    outcome.exit_code = service.exit_code or 0
    outcome.leaks += service.left_over()
    try:
        outcome.growth = growth(outcome.samples, warm_up_s=_WARM_UP * outcome.seconds, limit=0.1)
    except ValueError:
        outcome.growth = []  # too short to judge
