"""Policies of the adapter's tests; the engine's worker imports them by `module:Class`."""

from __future__ import annotations

from tokenrouter.policies.base import Destinations, Handoff, Policy, PolicyParams, RouteBatch, Row


class Counts(Policy):
    """Counts its decisions in the request's state, and hands over after `after` tokens of a visit."""

    name = "counts"
    two_models = True

    class Params(PolicyParams):
        after: int = 3

    def route(self, batch: RouteBatch) -> Destinations:
        for row in batch.rows:
            row.state["decisions"] = row.state.get("decisions", 0) + 1
        return [row.visit_tokens + 1 >= self.params.after for row in batch.rows]


class CountsAloud(Counts):
    """The same, but what it counts follows from the tokens."""

    name = "counts_aloud"
    rebuilds_state = True


class Raises(Policy):
    """`route` raises at a position of the response, at every model."""

    name = "raises"

    class Params(PolicyParams):
        position: int = 5

    def route(self, batch: RouteBatch) -> Destinations:
        if max(batch.positions) >= self.params.position:
            raise RuntimeError("boom")
        return [batch.model] * len(batch)


class Reads(Policy):
    """Reads hidden states at the small model, and single requests there: cannot run inside a model."""

    name = "reads"
    two_models = True

    def needs_hidden(self, model: str) -> bool:
        return model == self.models[0]

    def route(self, batch: RouteBatch) -> Destinations:
        return [seed % 2 == 0 for seed in batch.seeds]

    def send(self, row: Row, target: str) -> Handoff:
        return Handoff(keep_token=False)


class Odd(Policy):
    """Leaves where the token is odd."""

    name = "odd"
    two_models = True

    def needs_hidden(self, model: str) -> bool:
        return model == self.models[0]

    def needs_token(self, model: str) -> bool:
        return True

    def route(self, batch: RouteBatch) -> Destinations:
        return batch.tokens % 2 == 1
