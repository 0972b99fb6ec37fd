"""The offline engine: routed generation in one process, without a server.

The same state machines as in the server, driven by a loop that hands messages over directly. With a fixed seed it gives
the tokens that the server gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from tokenrouter.assembly import Entry, build_subserver
from tokenrouter.batcher import WaitUntil
from tokenrouter.entry_queue import EntryQueuePolicy
from tokenrouter.errors import RouterError
from tokenrouter.orchestrator.machine import Orchestrator
from tokenrouter.repository import Repository
from tokenrouter.request import RequestFields
from tokenrouter.response import Result, Update
from tokenrouter.statistics import SubserverStatistics
from tokenrouter.subserver.machine import Subserver

_PEER = 1
# Nobody is ready and nobody's delay is over yet; delays are of the order of milliseconds.
_NAP_S = 0.0005


class TokenRouter:
    """Generates with all models of a repository in this process.

    Example::

        with TokenRouter.from_repository("model_repository") as router:
            for result in router.generate(["start 12; +34"], max_tokens=96):
                print(result.text, result.tokens_by_model)

    Args:
        entry: what the entry model's configuration gives.
        subservers: one per model, by name.
    """

    def __init__(self, entry: Entry, subservers: dict[str, Subserver]) -> None:
        self._entry = entry
        self._subservers = subservers
        self._orchestrator: Orchestrator = entry.orchestrator()
        self._news: dict[int, list[Update]] = {}
        for subserver in subservers.values():
            subserver.handle(_PEER, entry.hello("offline", "routed"), now_ns=time.monotonic_ns())
        self._exchange(time.monotonic_ns())

    @classmethod
    def from_repository(cls, repository: str | Path, *, entry: str = "tokenrouter") -> TokenRouter:
        """Loads every model that the entry model names.

        Args:
            repository: folder of a Triton model repository.
            entry: name of the entry model in it.

        Raises:
            ConfigError: a file of the repository is wrong.
        """
        source = Repository(repository)
        # All prompts of a call are here at once and nobody else waits: the queue's limits are for a server.
        config = replace(source.entry(entry), queue=EntryQueuePolicy())
        # Nobody calls the models directly here, so the whole KV pool is for routed requests.
        subservers = {
            name: build_subserver(replace(model, direct_kv_share=0.0), source)
            for name, model in source.models(config).items()
        }
        return cls(Entry(config, source), subservers)

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models, small first."""
        return self._entry.config.models

    @property
    def statistics(self) -> dict[str, SubserverStatistics]:
        """Counters of every model since it was loaded, by name."""
        return {name: subserver.statistics for name, subserver in self._subservers.items()}

    def generate(
        self,
        prompts: Sequence[str | Sequence[int] | RequestFields],
        *,
        progress: Callable[[int], None] | None = None,
        **fields: object,
    ) -> list[Result]:
        """Responses to all prompts, in their order; they run together as far as KV and `max_inflight` allow.

        Args:
            prompts: text, token ids, or complete `RequestFields` each.
            progress: called with the number of finished responses whenever it grows.
            fields: fields of `RequestFields` for every prompt that is not a `RequestFields`, for example
                `max_tokens=96, policy="rstitch", policy_params='{"threshold": 0.02}'`.

        Raises:
            RouterError: a request was refused or failed; the first such error, after all others are done.
        """
        results: dict[int, Result] = {}
        errors: list[RouterError] = []
        keys: list[int] = []
        try:
            for prompt in prompts:
                try:
                    keys.append(self._submit(_fields(prompt, fields)))
                except RouterError as exc:
                    errors.append(exc)
            for update in self._run(keys):
                if update.error is not None:
                    errors.append(update.error)
                elif update.result is not None:
                    results[update.key] = update.result
                if update.final and progress is not None:
                    progress(len(results) + len(errors))
        finally:
            self._forget(keys)
        if errors:
            raise errors[0]
        return [results[key] for key in keys]

    def stream(self, prompt: str | Sequence[int] | RequestFields, **fields: object) -> Iterator[Update]:
        """Updates of one response as its tokens come; the last one has `result`.

        Raises:
            RouterError: the request was refused or failed.
        """
        key = self._submit(replace(_fields(prompt, fields), stream=True))
        try:
            for update in self._run([key]):
                if update.error is not None:
                    raise update.error
                yield update
        finally:
            self._forget([key])

    def close(self) -> None:
        """Frees the engines."""
        for subserver in self._subservers.values():
            subserver.engine.shutdown()

    def __enter__(self) -> TokenRouter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _submit(self, fields: RequestFields) -> int:
        request = self._entry.builder.build(fields)
        return self._orchestrator.submit(request, now_ns=time.monotonic_ns())

    def _run(self, keys: Sequence[int]) -> Iterator[Update]:
        """Turns every model in turn until these requests are over; news of others waits for whoever asks for it."""
        running = set(keys)
        while running:
            for key in running & self._news.keys():
                for update in self._news.pop(key):
                    if update.final:
                        running.discard(key)
                    yield update
            if running:
                self._advance()

    def _advance(self) -> None:
        now_ns = time.monotonic_ns()
        self._orchestrator.tick(now_ns=now_ns)
        self._exchange(now_ns)
        ran = [self._turn(subserver) for subserver in self._subservers.values()]
        self._collect()
        if not any(ran):
            time.sleep(_NAP_S)

    def _collect(self) -> None:
        for update in self._orchestrator.take_updates():
            self._news.setdefault(update.key, []).append(update)

    def _forget(self, keys: Sequence[int]) -> None:
        """Ends what still runs of these requests, because the caller stopped early or something raised."""
        now_ns = time.monotonic_ns()
        for key in keys:
            self._orchestrator.cancel(key, now_ns=now_ns)
        self._exchange(now_ns)
        self._collect()
        for key in keys:
            self._news.pop(key, None)

    def _turn(self, subserver: Subserver) -> bool:
        plan = subserver.poll(now_ns=time.monotonic_ns())
        if plan is None or isinstance(plan, WaitUntil):
            return False
        subserver.run_step(plan)
        self._exchange(time.monotonic_ns())
        return True

    def _exchange(self, now_ns: int) -> None:
        """Delivers messages both ways until nobody has any."""
        orchestrator = self._orchestrator
        while orchestrator.outbox or any(subserver.outbox for subserver in self._subservers.values()):
            for name, subserver in self._subservers.items():
                reports, subserver.outbox = subserver.outbox, []
                for _, report in reports:
                    orchestrator.receive(name, report, now_ns=now_ns)
            messages, orchestrator.outbox = orchestrator.outbox, []
            for name, message in messages:
                self._subservers[name].handle(_PEER, message, now_ns=now_ns)


def _fields(prompt: str | Sequence[int] | RequestFields, fields: dict[str, object]) -> RequestFields:
    if isinstance(prompt, RequestFields):
        return replace(prompt, **fields) if fields else prompt  # type: ignore[arg-type]
    given = {"text_input": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    return RequestFields(**given, **fields)  # type: ignore[arg-type]
