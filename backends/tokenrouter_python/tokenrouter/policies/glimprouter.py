"""GlimpRouter (arXiv 2601.05110): the first token of each reasoning step decides which model writes the step.

At the start of a step the small model's 20 largest probabilities are renormalised and their entropy H taken in nats.
**H >= threshold** gives the step to the large model, up to its end at a blank line (or after 512 tokens); then the
small model glimpses again. After ``</think>`` the large model writes the final answer and never leaves. Source:
Zengwh02/GlimpRouter, src/glimp_router.py, src/main.py.

Differences, because models exchange tokens here and not texts:

* one forward pass of the small model serves the glimpse and, if the step stays, its first token (two in the source);
* text behind a step's end in the same token is kept; two ids of equal text count apart in H;
* ``</think>`` is not inserted: when steps repeat or the thinking budget is spent, the large model goes on from there;
* an end-of-text token ends the response, also within a step. At a trigger it is discarded like any token.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from tokenrouter.errors import InvalidRequest
from tokenrouter.messages import Measure
from tokenrouter.policies.base import Destinations, Handoff, Policy, PolicyParams, RouteBatch, Row, Visit
from tokenrouter.policies.explaining import measured
from tokenrouter.policies.measures import entropy

if TYPE_CHECKING:
    from torch import Tensor

# The source looks for repeated steps from the third one on.
_REPEAT_FROM = 3


class GlimpRouter(Policy):
    """Whole steps by the model that the glimpse names.

    State of a request: `start`, position of the step's first token; `seen`, positions accounted for; `steps` ended;
    `last`, digest of the last one; `answer`, the large model finishes; `trigger`, the last decision was to discard.
    """

    name = "glimprouter"
    two_models = True
    rebuilds_state = True

    class Params(PolicyParams):
        """Knobs of `GlimpRouter`.

        `threshold`: nats, of the entropy over the `top` largest probabilities (at most ln `top`; 0.9 in the source's
        script, 1.0 in its README). `separator` ends a step, as does its `step_limit`-th token. `think_end` ends the
        thinking, as do `think_limit` tokens and, with `stop_repeated`, two equal steps in a row.
        """

        threshold: float = 0.9
        top: int = 20
        separator: str = "\n\n"
        think_end: str = "</think>"
        step_limit: int = 512
        think_limit: int = 8192
        stop_repeated: bool = True

    def check(self) -> None:
        """Refuses texts that are empty and numbers that make no sense."""
        params = self.params
        if not params.threshold >= 0.0:
            raise InvalidRequest(f"policy_params.threshold is {params.threshold}; it is an entropy in nats, at least 0")
        for knob, least in (("top", 2), ("step_limit", 1), ("think_limit", 1)):
            if getattr(params, knob) < least:
                raise InvalidRequest(f"policy_params.{knob} is {getattr(params, knob)}; it is at least {least}")
        for knob in ("separator", "think_end"):
            if not getattr(params, knob):
                raise InvalidRequest(f"policy_params.{knob} is empty; give the text that it looks for")
        # A text of n bytes spans at most n tokens; a few more in case some give no text.
        self._window = 4 + max(len(params.separator.encode()), len(params.think_end.encode()))

    def prepare(self, model: str) -> None:
        """Checks that the tokenizer is there."""
        if model:
            self.needed("tokenizer", self.context.tokenizer)

    def receive(self, row: Row) -> Visit:
        """No limit: where a step ends is known from its text only. Accounts for tokens written elsewhere."""
        state = self._state(row)
        for position in range(state["seen"], row.position):
            self._advance(row, position, row.tokens[row.prompt_tokens + position])
        return Visit()

    def route(self, batch: RouteBatch) -> Destinations:
        """[B] names."""
        if batch.model == self.models[0]:
            return self._route_small(batch)
        states = [self._state(row) for row in batch.rows]
        if all(state["answer"] for state in states):
            return [batch.model] * len(batch)
        tokens: list[int] = batch.tokens.tolist()
        return [self._after_large(row, token) for row, token in zip(batch.rows, tokens, strict=True)]

    def explain(self, batch: RouteBatch) -> Sequence[Sequence[Measure]]:
        """The glimpse's entropy, for rows at the start of a step; within one there is nothing to look at."""
        found: list[Sequence[Measure]] = [()] * len(batch)
        starts = [row.state.get("start", 0) == row.position for row in batch.rows]
        if batch.model == self.models[0] and any(starts):
            glimpsed = measured("entropy", self._entropy(batch.logits), ">=", self.params.threshold)
            found = [measures if start else () for measures, start in zip(glimpsed, starts, strict=True)]
        return found

    def send(self, row: Row, target: str) -> Handoff:
        """The glimpsed token of a step for the large model is discarded; every other token is kept."""
        return Handoff(keep_token=row.model != self.models[0] or not row.state["trigger"])

    def _route_small(self, batch: RouteBatch) -> list[str]:
        starts = [self._state(row)["start"] == row.position for row in batch.rows]
        if any(starts):
            unsure = self._entropy(batch.logits) >= self.params.threshold
            # One tensor, so that the host waits for the device once.
            packed = batch.tokens.new_empty((2, len(batch)))
            packed[0], packed[1] = batch.tokens, unsure
            ids, flags = packed.tolist()
        else:
            ids, flags = batch.tokens.tolist(), [0] * len(batch)
        return [
            self._after_small(row, token, glimpse and bool(flag))
            for row, token, glimpse, flag in zip(batch.rows, ids, starts, flags, strict=True)
        ]

    def _entropy(self, logits: Tensor) -> Tensor:
        """[B] float32 nats. Softmax over the largest logits is the renormalised distribution."""
        return entropy(logits.topk(min(self.params.top, logits.shape[-1]), dim=-1).values)

    def _after_small(self, row: Row, token: int, unsure: bool) -> str:
        """The model that goes on; `unsure` at the start of a step discards the token."""
        state = row.state
        state["trigger"] = unsure or state["answer"]
        if not state["trigger"]:
            self._advance(row, row.position, token)
        return self.models[1] if state["trigger"] or state["answer"] else self.models[0]

    def _after_large(self, row: Row, token: int) -> str:
        """The model that goes on after a token of the large one."""
        state = row.state
        if not state["answer"]:
            self._advance(row, row.position, token)
        step_ended = state["start"] == row.position + 1
        return self.models[0] if step_ended and not state["answer"] else self.models[1]

    @staticmethod
    def _state(row: Row) -> dict[str, Any]:
        """The request's state, made on its first visit."""
        if "start" not in row.state:
            row.state.update(start=0, seen=0, steps=0, last=0, answer=False, trigger=False)
        return row.state

    def _advance(self, row: Row, position: int, token: int) -> None:
        """Accounts for the token at `position` of the response: does it end the step, or the thinking?"""
        state, params = row.state, self.params
        state["seen"] = position + 1
        first = max(0, position + 1 - self._window)
        if params.think_end in self._text(row, first, position, token):
            state["answer"] = True
            return
        full = position + 1 - state["start"] >= params.step_limit
        if full or params.separator in self._text(row, max(first, state["start"]), position, token):
            self._end_step(row, position, token)

    def _end_step(self, row: Row, position: int, token: int) -> None:
        state, params = row.state, self.params
        text = self._text(row, state["start"], position, token).split(params.separator)[0]
        digest = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
        state["steps"] += 1
        repeated = params.stop_repeated and state["steps"] >= _REPEAT_FROM and digest == state["last"]
        state["last"] = digest
        state["start"] = position + 1
        state["answer"] = repeated or position + 1 >= params.think_limit

    def _text(self, row: Row, first: int, position: int, token: int) -> str:
        """Text of positions [first, position) and `token`; special tokens included, ``</think>`` may be one."""
        begin = row.prompt_tokens
        ids: Sequence[int] = [*row.tokens[begin + first : begin + position], token]
        tokenizer = self.needed("tokenizer", self.context.tokenizer)
        text: str = tokenizer.decode(ids, skip_special_tokens=False)
        return text
