"""Policies that go wrong in one chosen method, each in one chosen way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenrouter.errors import InvalidRequest
from tokenrouter.policies.base import Destinations, EntryRequest, Handoff, Policy, PolicyParams, RouteBatch, Row, Visit


class Faulty(Policy):
    """Alternates between all models, and goes wrong in method `method` from position `position` on."""

    name = "faulty"

    class Params(PolicyParams):
        method: str = ""
        fault: str = "raises"
        position: int = 0

    def _at(self, method: str, position: int, answer: Any) -> Any:
        if self.params.method != method or position < self.params.position:
            return answer
        return FAULTS[self.params.fault](answer)

    def visited(self) -> tuple[str, ...]:
        return self._at("visited", 1 << 30, self.models)

    def entry(self, request: EntryRequest) -> str:
        return self._at("entry", 1 << 30, self.models[0])

    def mask(self, model: str, vocab_size: int) -> Sequence[int]:
        return self._at("mask", 1 << 30, ())

    def receive(self, row: Row) -> Visit:
        return self._at("receive", row.position, Visit())

    def route(self, batch: RouteBatch) -> Destinations:
        names = [self.models[(row.position + 1) % len(self.models)] for row in batch.rows]
        return self._at("route", max(batch.positions), names)

    def send(self, row: Row, target: str) -> Handoff:
        return self._at("send", row.position, Handoff(keep_token=True))


class CannotSay(Policy):
    """One model writes, and does not know what it remembers."""

    name = "cannot_say"

    def remembers(self, model: str) -> bool:
        raise RuntimeError("boom")


class Remembers(Policy):
    """The large model writes every third token, by a count in the state that no token tells."""

    name = "remembers"
    two_models = True

    def receive(self, row: Row) -> Visit:
        return Visit(limit=1, then="small") if row.model == "large" else Visit()

    def route(self, batch: RouteBatch) -> Destinations:
        for row in batch.rows:
            row.state["asked"] = row.state.get("asked", 0) + 1
        return [row.state["asked"] % 3 == 0 for row in batch.rows]

    def send(self, row: Row, target: str) -> Handoff:
        return Handoff(keep_token=False)

    def remembers(self, model: str) -> bool:
        return model == "small"


class PingPong(Policy):
    """Nobody ever keeps a token."""

    name = "ping_pong"

    def route(self, batch: RouteBatch) -> Destinations:
        return [True] * len(batch)

    def send(self, row: Row, target: str) -> Handoff:
        return Handoff(keep_token=False)


class Stray(Policy):
    """Leaves to a model that it does not list."""

    name = "stray"

    def visited(self) -> tuple[str, ...]:
        return ("small",)

    def route(self, batch: RouteBatch) -> Destinations:
        return ["large"] * len(batch)


class Stateful(Policy):
    """Counts hand-offs in the state that travels."""

    name = "stateful"

    def route(self, batch: RouteBatch) -> Destinations:
        return [True] * len(batch)

    def send(self, row: Row, target: str) -> Handoff:
        return Handoff(keep_token=True, state={"handoffs": row.state.get("handoffs", 0) + 1})

    def receive(self, row: Row) -> Visit:
        if row.state.get("handoffs", 0) != row.position:
            raise InvalidRequest(f"state {row.state} at position {row.position}")
        return Visit()


def _raise(answer: Any) -> Any:
    raise RuntimeError("boom")


def _exit(answer: Any) -> Any:
    raise SystemExit("boom")  # no Exception; it would end a thread without a word


def _refuse(answer: Any) -> Any:
    raise InvalidRequest("boom")


FAULTS: dict[str, Callable[[Any], Any]] = {
    "raises": _raise,
    "exits": _exit,
    "refuses": _refuse,
    "returns_none": lambda answer: None,
    "returns_unknown_model": lambda answer: ["nowhere"] * len(answer),
    "returns_unknown_index": lambda answer: [7] * len(answer),
    "returns_too_few": lambda answer: answer[1:],
    "returns_nowhere": lambda answer: "nowhere",
    "returns_unknown_limit": lambda answer: Visit(limit=1, then="nowhere"),
    "returns_zero_limit": lambda answer: Visit(limit=0, then="small"),
    "returns_foreign_state": lambda answer: Handoff(keep_token=True, state={"array": object()}),
    "returns_big_number": lambda answer: Handoff(keep_token=True, state={"big": 1 << 80}),
    "returns_ids_out_of_range": lambda answer: [10**6],
    "returns_text_ids": lambda answer: ["a"],
}
