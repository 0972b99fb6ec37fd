"""Replays given route decisions: for tests, and for replaying a recorded routing trace on other hardware."""

from __future__ import annotations

from typing import Literal

from tokenrouter.errors import InvalidRequest
from tokenrouter.policies.base import Destinations, EntryRequest, Handoff, Policy, PolicyParams, RouteBatch, Row


class Scripted(Policy):
    """Position i of the response is written by `writers[i % len(writers)]`.

    With `trigger: discard` a model samples the position that another one writes and throws its token away, as R2R and
    R-Stitch do; with `trigger: keep` it leaves together with the last token it writes, as ME does.
    """

    name = "scripted"

    class Params(PolicyParams):
        """Knobs of `Scripted`. `writers`: model names or indices, one per position, repeated from the start."""

        writers: tuple[str | int, ...]
        trigger: Literal["discard", "keep"] = "discard"

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

    def _writer(self, position: int) -> str:
        writer: str = self._writers[position % len(self._writers)]
        return writer

    def entry(self, request: EntryRequest) -> str:
        """The writer of the first token; with `discard` the first model, so that the first token can be a trigger."""
        return self.models[0] if self.params.trigger == "discard" else self._writer(0)

    def route(self, batch: RouteBatch) -> Destinations:
        """The writer of this position, or with `keep` of the next one."""
        ahead = 1 if self.params.trigger == "keep" else 0
        return [self._writer(row.position + ahead) for row in batch.rows]

    def send(self, row: Row, target: str) -> Handoff:
        """Keeps or discards as `trigger` says."""
        return Handoff(keep_token=self.params.trigger == "keep")
