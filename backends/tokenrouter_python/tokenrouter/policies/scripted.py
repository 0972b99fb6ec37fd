"""Replays given route decisions: for tests, and for replaying a recorded routing trace on other hardware."""

from __future__ import annotations

from typing import Literal

from tokenrouter.errors import InvalidRequest
from tokenrouter.policies.base import Destinations, EntryRequest, Handoff, Policy, PolicyParams, RouteBatch, Row, Visit


class Scripted(Policy):
    """Position i of the response is written by `writers[i % len(writers)]`.

    `trigger` says how a model learns that another one writes. With `discard` it samples that position and throws its
    token away. With `keep` it leaves together with the last token it writes, as ME does. With `first` the deployment's
    first model discards and the others keep, as R-Stitch does; with `visit_tokens: 1` too, as R2R, CITER and Co-LLM do:
    another model's consecutive tokens are visits of their own.
    """

    name = "scripted"

    class Params(PolicyParams):
        """Knobs of `Scripted`.

        `writers`: model names or indices, one per position, repeated from the start. `visit_tokens`: with `first`, a
        visit to another model than the first ends after so many tokens.
        """

        writers: tuple[str | int, ...]
        trigger: Literal["discard", "keep", "first"] = "discard"
        visit_tokens: int | None = None

    def check(self) -> None:
        """Resolves names."""
        writers: tuple[str | int, ...] = self.params.writers
        if not writers:
            raise InvalidRequest("policy_params.writers is empty; name at least one model")
        names: dict[str | int, str] = dict(enumerate(self.models))
        names.update({name: name for name in self.models})
        unknown = [writer for writer in writers if writer not in names]
        if unknown:
            raise InvalidRequest(f"policy_params.writers has {unknown[0]!r}; known: {', '.join(self.models)}")
        self._writers = tuple(names[writer] for writer in writers)
        limit = self.params.visit_tokens
        if limit is not None and (limit < 1 or self.params.trigger != "first"):
            raise InvalidRequest(f"policy_params.visit_tokens is {limit}; it is at least 1, and needs trigger 'first'")

    def _writer(self, position: int) -> str:
        writer: str = self._writers[position % len(self._writers)]
        return writer

    def entry(self, request: EntryRequest) -> str:
        """The writer of the first token with `keep`; else the first model, so that the first token can be a trigger."""
        return self._writer(0) if self.params.trigger == "keep" else self.models[0]

    def speculates(self) -> bool:
        """If the first model discards where it leaves, and the others keep."""
        return bool(self.params.trigger == "first")

    def receive(self, row: Row) -> Visit:
        """The limit of visits, see `Params`."""
        limited = self.params.visit_tokens is not None and row.model != self.models[0]
        return Visit(limit=self.params.visit_tokens, then=self.models[0]) if limited else Visit()

    def route(self, batch: RouteBatch) -> Destinations:
        """The writer of this position, or where the token is kept of the next one."""
        ahead = 1 if self._keeps(batch.model) else 0
        return [self._writer(row.position + ahead) for row in batch.rows]

    def send(self, row: Row, target: str) -> Handoff:
        """Keeps or discards as `trigger` says."""
        return Handoff(keep_token=self._keeps(row.model))

    def _keeps(self, model: str) -> bool:
        return self.params.trigger == "keep" or (self.params.trigger == "first" and model != self.models[0])
