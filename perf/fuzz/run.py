"""One fuzz of a running server: neighbours with known answers run beside every protocol's malformed requests."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing
from itertools import count

from perf.fuzz.answers import Answers
from perf.fuzz.channel import ChannelSender
from perf.fuzz.http import http_request
from perf.fuzz.openai import openai_request
from perf.fuzz.plan import Outcome, Plan, Round, Target
from perf.fuzz.senders import GrpcSender, HttpSender, Sender
from perf.load.known import KnownAnswer
from perf.load.known_loop import KnownLoop
from perf.load.soak.memory import Watch, growth
from perf.stall.prober import Prober
from tools.progress import Report

_INTERVAL_S = 0.25
_WARM_UP = 0.4
_LEAST_S = 6.0
_CALM_S = 5.0


def fuzz(target: Target, answers: Sequence[KnownAnswer], prober: Prober, plan: Plan, report: Report) -> Outcome:
    """Sends everything; afterwards the server is idle again.

    Args:
        target: the server.
        answers: what neighbours ask.
        prober: of this server, running; its streams are watched for stalls.
        plan: what to send.
        report: told how far it is.
    """
    outcome = Outcome()
    with KnownLoop(target.to, answers, plan.neighbours, seed=plan.seed) as loop:
        began_s = time.perf_counter()
        time.sleep(_CALM_S)
        outcome.calm_stall_s = max(prober.gaps(began_s, time.perf_counter()), default=0.0)
        for done, protocol in enumerate(plan.protocols):
            report(f"malformed requests over {protocol}", done / len(plan.protocols))
            outcome.rounds[protocol] = fuzzed = _round(protocol, target, plan, prober, report)
            if fuzzed.ended:
                break
    outcome.neighbours = loop.judged
    return outcome


def _round(protocol: str, target: Target, plan: Plan, prober: Prober, report: Report) -> Round:
    answers, watch = Answers(), Watch(target.pids)
    numbers, began_s = count(plan.first), time.perf_counter()

    def client() -> None:
        with closing(_sender(protocol, target, answers, plan.patience_s)) as send:
            while (number := next(numbers)) < plan.first + plan.requests and not watch.ended:
                send(random.Random(f"{plan.seed}/{protocol}/{number}"))

    with ThreadPoolExecutor(plan.clients) as pool:
        clients = [pool.submit(client) for _ in range(plan.clients)]
        while not all(client.done() for client in clients):
            watch.look()
            report(f"malformed requests over {protocol}", answers.requests / plan.requests)
            wait(clients, _INTERVAL_S)
        for ended in clients:
            ended.result()
    ended_s = time.perf_counter()
    seconds, stall_s = ended_s - began_s, max(prober.gaps(began_s, ended_s), default=0.0)
    judged = seconds >= _LEAST_S and not watch.ended
    flat = growth(watch.samples, warm_up_s=_WARM_UP * seconds, limit=plan.limit) if judged else []
    return Round(answers, seconds, stall_s, flat, watch.ended)


def _sender(protocol: str, target: Target, answers: Answers, patience_s: float) -> Sender:
    """What sends one request of a protocol."""
    if protocol == "grpc":
        return GrpcSender(target.to.grpc, answers, patience_s)
    if protocol == "http":
        return HttpSender(target.to.http, http_request, answers, patience_s)
    if protocol == "v1":
        return HttpSender(target.to.openai, openai_request, answers, patience_s)
    return ChannelSender(target.sockets, answers, patience_s)
