"""What becomes of a request: its updates on the way, and its result at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from tokenrouter.errors import RouterError
from tokenrouter.messages import Decision


class Run(msgspec.Struct):
    """Consecutive tokens [start, end) of a response by one model."""

    model: str
    start: int
    end: int


@dataclass(slots=True)
class Result:
    """A finished response.

    Attributes:
        text: of the whole response, a matched stop word included.
        tokens: ids of the whole response, EOS included.
        log_probs: of each token under the raw model that wrote it, if asked for.
        finish_reason: ``stop``, ``length`` or ``timeout``.
        runs: who wrote what.
        tokens_by_model: tokens written per model.
        handoffs: how often the request changed the model.
        kv_blocks: KV blocks reserved per model.
        seed: of the request, given or drawn.
        policy: name of the policy.
        emulated: the tokens do not come from real models.
        arrived_ns, started_ns, first_token_ns, last_token_ns: CLOCK_MONOTONIC.
        discards: hand-offs at which the small model's token was discarded, by policies whose small model may go ahead.
        agreed: at how many of them the large model wrote the discarded token.
        decisions: why each token was handed over or not, in order, if asked for; `sampled` is the text of its token.
    """

    text: str
    tokens: list[int]
    log_probs: list[float]
    finish_reason: str
    runs: list[Run]
    tokens_by_model: dict[str, int]
    handoffs: int
    kv_blocks: dict[str, int]
    seed: int
    policy: str
    emulated: bool
    arrived_ns: int
    started_ns: int
    first_token_ns: int
    last_token_ns: int
    discards: int = 0
    agreed: int = 0
    decisions: list[Decision] | None = None
    sampled: list[str] = field(default_factory=list)

    def totals(self) -> dict[str, Any]:
        """Who wrote how much, as clients are told: `tokens` by model, `handoffs`, `policy`, `seed`, `emulated`.

        And `discards` and `agreed`, if there was anything to compare, and `decisions`, if asked for.
        """
        totals: dict[str, Any] = {
            "tokens": self.tokens_by_model,
            "handoffs": self.handoffs,
            "policy": self.policy,
            "seed": self.seed,
        }
        if self.discards:
            totals |= {"discards": self.discards, "agreed": self.agreed}
        if self.decisions is not None:
            totals["decisions"] = [_plain(*each) for each in zip(self.decisions, self.sampled, strict=True)]
        return {**totals, "emulated": True} if self.emulated else totals


def _plain(decision: Decision, text: str) -> dict[str, Any]:
    """A decision as clients are told."""
    fields = {name: getattr(decision, name) for name in decision.__struct_fields__}
    named = [{name: getattr(measure, name) for name in measure.__struct_fields__} for measure in decision.measures]
    return {**fields, "text": text, "measures": named}


class Update(msgspec.Struct):
    """News about one request: new tokens, or its end (`result` or `error`), or both.

    Text and tokens are what is new since the last update; a request without `stream` gets one update only.
    """

    key: int
    text: str = ""
    tokens: list[int] = []
    log_probs: list[float] = []
    runs: list[Run] = []
    result: Result | None = None
    error: RouterError | None = None

    @property
    def final(self) -> bool:
        """Whether the request is over."""
        return self.result is not None or self.error is not None

    def merge(self, later: Update) -> None:
        """Takes in the next update of the same request."""
        self.text += later.text
        self.tokens = self.tokens + later.tokens
        self.log_probs = self.log_probs + later.log_probs
        self.runs = self.runs + later.runs
        self.result, self.error = later.result, later.error
