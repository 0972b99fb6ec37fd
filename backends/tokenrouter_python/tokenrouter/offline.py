"""The offline engine: routed generation in one process, without a server.

The same state machines as in the server; with a fixed seed it gives the tokens that the server gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tokenrouter.errors import RouterError
from tokenrouter.inprocess import InProcessDriver
from tokenrouter.request import RequestFields
from tokenrouter.response import Result, Update
from tokenrouter.statistics import SubserverStatistics


class TokenRouter:
    """Generates with all models of a repository in this process.

    Example::

        with TokenRouter.from_repository("model_repository") as router:
            for result in router.generate(["start 12; +34"], max_tokens=96):
                print(result.text, result.tokens_by_model)
    """

    def __init__(self, driver: InProcessDriver) -> None:
        self._driver = driver
        self._news: dict[int, list[Update]] = {}

    @classmethod
    def from_repository(cls, repository: str | Path, *, entry: str = "tokenrouter") -> TokenRouter:
        """Loads every model that the entry model names.

        Args:
            repository: folder of a Triton model repository.
            entry: name of the entry model in it.

        Raises:
            ConfigError: a file of the repository is wrong.
        """
        return cls(InProcessDriver.load(repository, entry=entry))

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models, small first."""
        return self._driver.entry.config.models

    @property
    def statistics(self) -> dict[str, SubserverStatistics]:
        """Counters of every model since it was loaded, by name."""
        return {name: subserver.statistics for name, subserver in self._driver.subservers.items()}

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
                `max_tokens=96, policy="rstitch", policy_params={"threshold": 0.02}`.

        Raises:
            RouterError: a request was refused or failed; the first such error, after all others are done.
        """
        results: dict[int, Result] = {}
        errors: list[RouterError] = []
        keys: list[int] = []
        try:
            for prompt in prompts:
                try:
                    keys.append(self._driver.submit(_fields(prompt, fields)))
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
        key = self._driver.submit(replace(_fields(prompt, fields), stream=True))
        try:
            for update in self._run([key]):
                if update.error is not None:
                    raise update.error
                yield update
        finally:
            self._forget([key])

    def close(self) -> None:
        """Frees the engines."""
        self._driver.close()

    def __enter__(self) -> TokenRouter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
                self._keep(self._driver.turn())

    def _keep(self, updates: Sequence[Update]) -> None:
        for update in updates:
            self._news.setdefault(update.key, []).append(update)

    def _forget(self, keys: Sequence[int]) -> None:
        """Ends what still runs of these requests, because the caller stopped early or something raised."""
        self._driver.cancel(keys)
        self._keep(self._driver.orchestrator.take_updates())
        for key in keys:
            self._news.pop(key, None)


def _fields(prompt: str | Sequence[int] | RequestFields, fields: dict[str, object]) -> RequestFields:
    if isinstance(prompt, RequestFields):
        return replace(prompt, **fields) if fields else prompt  # type: ignore[arg-type]
    given = {"text_input": prompt} if isinstance(prompt, str) else {"input_ids": list(prompt)}
    return RequestFields(**given, **fields)  # type: ignore[arg-type]
