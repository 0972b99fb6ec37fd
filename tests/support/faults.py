"""Policies that break something on purpose; the server imports them by `module:Class`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenrouter.engines.base import EngineRow, StepResult
from tokenrouter.policies.base import Destinations, Handoff, Policy, PolicyParams, RouteBatch, Row

POISON = "~~~~"
# Ids follow the order of the byte alphabet, which begins with "!".
_POISON_IDS = [ord(letter) - ord("!") for letter in POISON]


class Alternating(Policy):
    """Every position by the other model."""

    name = "alternating"

    def route(self, batch: RouteBatch) -> Destinations:
        return [self.models[(row.position + 1) % len(self.models)] for row in batch.rows]

    def send(self, row: Row, target: str) -> Handoff:
        return Handoff(keep_token=True)


class RaisesAt(Alternating):
    """`route` raises at a position."""

    name = "raises_at"

    class Params(PolicyParams):
        position: int = 5

    def route(self, batch: RouteBatch) -> Destinations:
        if max(batch.positions) >= self.params.position:
            raise RuntimeError("boom")
        return super().route(batch)


class HangsAt(Alternating):
    """`route` never returns at a position."""

    name = "hangs_at"

    class Params(PolicyParams):
        position: int = 5

    def route(self, batch: RouteBatch) -> Destinations:
        if max(batch.positions) >= self.params.position:
            time.sleep(3600.0)
        return super().route(batch)


class BreaksEngine(Alternating):
    """The engine of every model that runs this policy raises from then on when a sequence ends with `POISON`."""

    name = "breaks_engine"

    def mask(self, model: str, vocab_size: int) -> Sequence[int]:
        _poison()
        return ()


@cache
def _poison() -> None:
    from tokenrouter.engines.emulated.engine import EmulatedEngine  # brings torch along, which no entry model needs

    healthy_step = EmulatedEngine.step

    def poisoned_step(self: Any, rows: Sequence[EngineRow], *others: Any) -> StepResult:
        for row in rows:
            if [*self._open[row.handle].tokens, *row.tokens][-len(POISON) :] == _POISON_IDS:
                raise RuntimeError("poisoned")
        return healthy_step(self, rows, *others)

    EmulatedEngine.step = poisoned_step  # type: ignore[method-assign]
