"""An orchestrator and its models in one process: the server's state machines, and messages handed over directly.

Drives the offline engine and the synchronous baselines of the benchmarks. One thread owns all of it; an engine that
owns its loop may wake that thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenrouter.assembly import Entry, build_subserver
from tokenrouter.batcher import Batching, WaitUntil
from tokenrouter.entry_queue import EntryQueuePolicy
from tokenrouter.messages import decode_for_orchestrator, decode_for_subserver
from tokenrouter.repository import Repository
from tokenrouter.request import RequestFields
from tokenrouter.response import Update
from tokenrouter.subserver.machine import Subserver
from tokenrouter.subserver.runner import Plan

_PEER = 1


class InProcessDriver:
    """See the module's text; a context manager.

    Args:
        entry: what the entry model's configuration gives.
        subservers: one per replica of a model, by name, small first.
    """

    def __init__(self, entry: Entry, subservers: Mapping[str, Subserver]) -> None:
        self.entry = entry
        self.orchestrator = entry.orchestrator()
        self.subservers = subservers
        self._news = threading.Event()
        for subserver in subservers.values():
            subserver.listen(self._news.set)
            subserver.handle(_PEER, entry.hello("in process", "routed"), now_ns=time.monotonic_ns())
        self.exchange()

    @classmethod
    def load(cls, repository: str | Path, *, entry: str, batching: Batching | None = None) -> InProcessDriver:
        """Loads every model that an entry model of a repository names.

        Args:
            repository: folder of a Triton model repository.
            entry: name of the entry model in it.
            batching: thresholds of all models, instead of their own.

        Raises:
            ConfigError: a file of the repository is wrong.
        """
        source = Repository(repository)
        # All prompts of a call are here at once and nobody else waits: the queue's limits are for a server.
        config = replace(source.entry(entry), queue=EntryQueuePolicy(), max_request_ns=0)
        subservers = {}
        for name, model in source.models(config).items():
            # Nobody calls the models directly here, so the whole KV pool is for routed requests.
            model = replace(model, direct_kv_share=0.0, unary_kv_share=0.0, batching=batching or model.batching)
            subservers[name] = build_subserver(model, source)
        return cls(Entry(config, source), subservers)

    def submit(self, fields: RequestFields) -> int:
        """A request arrives. Returns its key.

        Raises:
            RouterError: the request is refused; nothing was kept.
        """
        request = self.entry.builder.build(fields, check_length=self.orchestrator.check_length)
        return self.orchestrator.submit(request, now_ns=time.monotonic_ns())

    def cancel(self, keys: Iterable[int]) -> None:
        """Ends these requests at once; those that are over are ignored."""
        now_ns = time.monotonic_ns()
        for key in keys:
            self.orchestrator.cancel(key, now_ns=now_ns)
        self.exchange()

    def turn(self) -> list[Update]:
        """One step of every model that may start one. If there was nothing to do, waits until there is something."""
        self._news.clear()  # before anybody is asked, so that news that come meanwhile end the wait
        self._tick()
        plans = [self._advance(subserver) for subserver in self.subservers.values()]
        updates = self.orchestrator.take_updates()
        waits = [plan for plan in plans if plan is None or isinstance(plan, WaitUntil)]
        if not updates and len(waits) == len(plans):
            self._wait([wait.at_ns for wait in waits if wait is not None])
        return updates

    def exchange(self) -> None:
        """Delivers messages both ways until nobody has any."""
        now_ns = time.monotonic_ns()
        orchestrator = self.orchestrator
        while orchestrator.outbox or any(subserver.outbox for subserver in self.subservers.values()):
            for name, subserver in self.subservers.items():
                reports, subserver.outbox = subserver.outbox, []
                for _, report in reports:
                    orchestrator.receive(name, self.travel(decode_for_orchestrator, report), now_ns=now_ns)
            messages, orchestrator.outbox = orchestrator.outbox, []
            for name, message in messages:
                self.subservers[name].handle(_PEER, self.travel(decode_for_subserver, message), now_ns=now_ns)

    @staticmethod
    def travel(decode: Callable[[Any], Any], message: Any) -> Any:
        """What arrives of a message: within one process itself; `decode` is for those that encode it."""
        return message

    def close(self) -> None:
        """Frees the engines."""
        for subserver in self.subservers.values():
            subserver.engine.shutdown()

    def __enter__(self) -> InProcessDriver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tick(self) -> None:
        now_ns = time.monotonic_ns()
        deadline_ns = self.orchestrator.next_deadline_ns()
        if deadline_ns is not None and now_ns >= deadline_ns:
            self.orchestrator.tick(now_ns=now_ns)
        self.exchange()

    def _advance(self, subserver: Subserver) -> Plan | WaitUntil | None:
        """Runs the model's plan if it has one; what it said otherwise."""
        plan = subserver.poll(now_ns=time.monotonic_ns())
        if plan is not None and not isinstance(plan, WaitUntil):
            subserver.run_step(plan)
            self.exchange()
        return plan

    def _wait(self, times_ns: list[int]) -> None:
        """Sleeps until the earliest deadline or an engine's news."""
        deadline_ns = self.orchestrator.next_deadline_ns()
        if deadline_ns is not None:
            times_ns = [*times_ns, deadline_ns]
        left_s = (min(times_ns) - time.monotonic_ns()) * 1e-9 if times_ns else threading.TIMEOUT_MAX
        self._news.wait(min(max(0.0, left_s), threading.TIMEOUT_MAX))
