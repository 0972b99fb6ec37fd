"""Synchronous baselines in one process: one loop over all models, by one of the rules in `turns`.

Favourable to the baselines: there is no server, no network, no other process and no serialisation; requests are here
the moment they are sent and tokens the moment their turn is over. KV stays between visits, hand-offs carry only unseen
tokens, and the batch is continuous (a response that ends makes room at once), none of which official code has.
Engines, sampler, policies and bookkeeping are the production ones, so the tokens are those of the server.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from perf.baselines.turns import Rule
from perf.load.requests import Load, Request, Response, Run
from tokenrouter.assembly import Entry, build_subserver
from tokenrouter.batcher import Batching
from tokenrouter.config import SubserverConfig
from tokenrouter.entry_queue import EntryQueuePolicy
from tokenrouter.repository import Repository
from tokenrouter.request import RequestFields
from tokenrouter.response import Update
from tokenrouter.subserver.machine import Subserver
from tokenrouter.subserver.stepped import StepPlan

_PEER = 1


class InProcess:
    """All models of a repository in this process; a context manager.

    Args:
        repository: the model repository. Its thresholds are ignored: whoever is at a model that steps takes part.

    Attributes:
        turns: turns so far.
        waiting_s: seconds of them in engine steps; the rest of the time is the driver's own work.
    """

    def __init__(self, repository: Path, *, entry: str = "tokenrouter") -> None:
        source = Repository(repository)
        config = replace(source.entry(entry), queue=EntryQueuePolicy())
        self.turns = 0
        self.waiting_s = 0.0
        self._entry = Entry(config, source)
        self._subservers = [_eager(model, source) for model in source.models(config).values()]
        self._orchestrator = self._entry.orchestrator()
        self._threads = ThreadPoolExecutor(max(1, len(self._subservers) - 1))
        for subserver in self._subservers:
            subserver.handle(_PEER, self._entry.hello("baseline", "routed"), now_ns=time.monotonic_ns())
        self._exchange()
        self._last = len(self._subservers) - 1

    def run(self, load: Load, rule: Rule) -> Run:
        """The closed loop of a load under a rule, from beginning to end; afterwards nothing is in flight."""
        responses: dict[int, Response] = {}
        done: list[Response] = []
        begin = time.perf_counter()
        for index in range(load.in_flight):
            self._submit(load.request(index), responses)
        upcoming, whole = load.in_flight, 0
        while not load.over(time.perf_counter() - begin, whole):
            for update in self._turn(rule):
                response = responses[update.key]
                if _take(response, update):
                    whole += response.request.whole
                    done.append(responses.pop(update.key))
                    self._submit(load.request(upcoming), responses)
                    upcoming += 1
        end = time.perf_counter()
        self._cancel(responses)
        return Run([*done, *responses.values()], begin + load.warm_up_s, end)

    def generate(self, requests: Sequence[Request], rule: Rule) -> list[Response]:
        """All responses, in the order of the requests; they run together."""
        responses: dict[int, Response] = {}
        for request in requests:
            self._submit(request, responses)
        left = dict(responses)
        while left:
            for update in self._turn(rule):
                if _take(left[update.key], update):
                    del left[update.key]
        return list(responses.values())

    def close(self) -> None:
        """Frees the engines."""
        self._threads.shutdown()
        for subserver in self._subservers:
            subserver.engine.shutdown()

    def __enter__(self) -> InProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, request: Request, responses: dict[int, Response]) -> None:
        fields = RequestFields(
            input_ids=request.input_ids, max_tokens=request.max_tokens, seed=request.seed, stream=True
        )
        sent_s = time.perf_counter()
        key = self._orchestrator.submit(self._entry.builder.build(fields), now_ns=time.monotonic_ns())
        responses[key] = Response(request, sent_s)

    def _turn(self, rule: Rule) -> list[Update]:
        """One turn: the models that the rule names step at the same time, then everything is handed over."""
        self._exchange()
        plans = [_plan(subserver) for subserver in self._subservers]
        counts = [0 if plan is None else len(plan.rows) for plan in plans]
        running = rule(counts, self._last)
        self._last = max(running)
        steps = [(self._subservers[i], plan) for i in running if (plan := plans[i]) is not None]
        started = time.perf_counter()
        others = [self._threads.submit(subserver.run_step, plan) for subserver, plan in steps[:-1]]
        subserver, plan = steps[-1]
        subserver.run_step(plan)
        for other in others:
            other.result()
        self.waiting_s += time.perf_counter() - started
        self.turns += 1
        self._exchange()
        return self._orchestrator.take_updates()

    def _exchange(self) -> None:
        """Delivers messages both ways until nobody has any."""
        now_ns = time.monotonic_ns()
        by_name = {subserver.name: subserver for subserver in self._subservers}
        while self._orchestrator.outbox or any(subserver.outbox for subserver in self._subservers):
            for subserver in self._subservers:
                reports, subserver.outbox = subserver.outbox, []
                for _, report in reports:
                    self._orchestrator.receive(subserver.name, report, now_ns=now_ns)
            messages, self._orchestrator.outbox = self._orchestrator.outbox, []
            for name, message in messages:
                by_name[name].handle(_PEER, message, now_ns=now_ns)

    def _cancel(self, responses: dict[int, Response]) -> None:
        for key in responses:
            self._orchestrator.cancel(key, now_ns=time.monotonic_ns())
        self._exchange()
        self._orchestrator.take_updates()


def _eager(config: SubserverConfig, repository: Repository) -> Subserver:
    return build_subserver(replace(config, batching=Batching(), direct_kv_share=0.0), repository)


def _plan(subserver: Subserver) -> StepPlan | None:
    """With a threshold of 1 everybody who is there is ready."""
    plan = subserver.poll(now_ns=time.monotonic_ns())
    return plan if isinstance(plan, StepPlan) else None


def _take(response: Response, update: Update) -> bool:
    """Notes what is new; whether the response is over."""
    if update.error is not None:
        raise update.error
    if update.tokens:
        response.arrived(time.perf_counter(), update.tokens)
    response.ended = update.final
    return update.final
