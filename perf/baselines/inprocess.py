"""Synchronous baselines in one process: one loop over all models, by one of the rules in `turns`.

Favourable to the baselines: there is no server, no network, no other process and no serialisation; requests are here
the moment they are sent and tokens the moment their turn is over. KV stays between visits, hand-offs carry only unseen
tokens, and the batch is continuous (a response that ends makes room at once), none of which official code has.
Engines, sampler, policies and bookkeeping are the production ones, so the tokens are those of the server.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from perf.baselines.turns import Rule
from perf.load.requests import Load, Request, Response, Run
from tokenrouter.batcher import Batching, WaitUntil
from tokenrouter.inprocess import InProcessDriver
from tokenrouter.request import RequestFields
from tokenrouter.response import Update
from tokenrouter.subserver.machine import Subserver
from tokenrouter.subserver.runner import Plan


class SynchronousBaseline:
    """All models of a repository in this process; a context manager.

    Args:
        repository: the model repository. Its thresholds are ignored: whoever is at a model that steps takes part.
    """

    def __init__(self, repository: Path, *, entry: str = "tokenrouter") -> None:
        self._driver = InProcessDriver.load(repository, entry=entry, batching=Batching())
        self._subservers = list(self._driver.subservers.values())
        self._threads = ThreadPoolExecutor(max(1, len(self._subservers) - 1))
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
        self._driver.cancel(responses)
        self._driver.orchestrator.take_updates()
        return Run([*done, *responses.values()], begin + load.warm_up_s, end)

    def close(self) -> None:
        self._threads.shutdown()
        self._driver.close()

    def __enter__(self) -> SynchronousBaseline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, request: Request, responses: dict[int, Response]) -> None:
        fields = RequestFields(
            input_ids=request.input_ids, max_tokens=request.max_tokens, seed=request.seed, stream=True
        )
        response = Response(request=request)
        responses[self._driver.submit(fields)] = response

    def _turn(self, rule: Rule) -> list[Update]:
        """One turn: the models that the rule names step at the same time, then everything is handed over."""
        self._driver.exchange()
        running = rule([subserver.residents for subserver in self._subservers], self._last)
        self._last = max(running)
        steps = [(self._subservers[i], _plan(self._subservers[i])) for i in running]
        others = [self._threads.submit(subserver.run_step, plan) for subserver, plan in steps[:-1]]
        subserver, plan = steps[-1]
        subserver.run_step(plan)
        for other in others:
            other.result()
        self._driver.exchange()
        return self._driver.orchestrator.take_updates()


def _plan(subserver: Subserver) -> Plan:
    """With a threshold of 1 everybody who is there is ready."""
    plan = subserver.poll(now_ns=time.monotonic_ns())
    if plan is None or isinstance(plan, WaitUntil):
        raise RuntimeError(f"{subserver.name} has no step to run; the baselines need engines that are stepped")
    return plan


def _take(response: Response, update: Update) -> bool:
    """Notes what is new; whether the response is over."""
    if update.error is not None:
        raise update.error
    if update.tokens:
        response.arrived(time.perf_counter(), update.tokens)
    response.ended = update.final
    return update.final
