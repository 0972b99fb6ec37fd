"""What becomes of the calls of a step: sampling, and the policy's decision for each, asked once per policy."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, cast

from perf.baselines.standard.wire import TOKEN_BYTES, Call, Reply
from tokenrouter import sampling
from tokenrouter.engines.base import StepResult
from tokenrouter.messages import Sampling
from tokenrouter.policies.base import Handoff, Policy, RouteBatch, Visit, destination_names


class CallRow:
    """One call as policies and the sampler see it. Satisfies `policies.base.Row` and `sampling.SampledRow`.

    Args:
        model: where it is.
        ids: token ids, INT32 bytes.
        call: see `Call`.
        policy: its policy.
        banned: ids that are never sampled.
    """

    def __init__(self, model: str, ids: bytes, call: Call, policy: Policy, banned: Sequence[int]) -> None:
        self.model = model
        self.ids = ids
        self.policy = policy
        self.banned = banned
        self.sampling: Sampling = call.sampling
        self.seed = call.sampling.seed
        self.source = call.source
        self.prompt_tokens = call.prompt_tokens
        self.position = len(ids) // TOKEN_BYTES - call.prompt_tokens
        self.visit_tokens = call.visit_tokens
        self.state: dict[str, Any] = call.state
        self.ran = 0
        self.visit = self._visit(call.plan)

    def _visit(self, plan: tuple[int, str] | None) -> Visit:
        if plan is None:
            return self.policy.receive(self)
        return Visit(plan[0] or None, plan[1])

    @cached_property
    def tokens(self) -> list[int]:
        """Prompt and committed tokens; made only for those who ask."""
        return array("i", self.ids).tolist()

    @property
    def limited(self) -> bool:
        """Whether the visit ends with this token."""
        return self.visit.limit is not None and self.visit_tokens + 1 >= self.visit.limit

    def response_counts(self) -> Counter[int]:
        return Counter(self.tokens[self.prompt_tokens :])

    def seen(self) -> set[int]:
        return set(self.tokens)


def decide(model: str, rows: Sequence[CallRow], result: StepResult) -> list[Reply | Exception]:
    """One answer per row, in their order; a failing policy fails only its own rows.

    Args:
        model: where the step ran.
        rows: [B] calls.
        result: the step's logits and hidden states, [B, ...].
    """
    tokens = sampling.sample(result.logits, cast(Sequence[sampling.SampledRow], rows))
    token_ids: list[int] = tokens.tolist()
    answers: list[Reply | Exception] = [RuntimeError("no decision")] * len(rows)
    for policy, index in _by_policy(rows):
        whole = len(index) == len(rows)
        batch = RouteBatch(
            model=model,
            rows=[rows[i] for i in index],
            tokens=tokens if whole else tokens[index],
            logits=result.logits if whole else result.logits[index],
            hidden=result.hidden if whole or result.hidden is None else result.hidden[index],
        )
        try:
            targets = destination_names(policy.route(batch), batch, policy.models)
            for i, target in zip(index, targets, strict=True):
                answers[i] = _reply(rows[i], token_ids[i], target)
        except Exception as exc:
            for i in index:
                answers[i] = exc
    for i, row in enumerate(rows):
        if row.limited:
            answers[i] = _reply(row, token_ids[i], row.visit.then)
    return answers


def _by_policy(rows: Sequence[CallRow]) -> Iterator[tuple[Policy, list[int]]]:
    groups: dict[Policy, list[int]] = {}
    for i, row in enumerate(rows):
        if not row.limited:
            groups.setdefault(row.policy, []).append(i)
    yield from groups.items()


def _reply(row: CallRow, token: int, target: str) -> Reply:
    handoff = Handoff(keep_token=True)
    if target != row.model and not row.limited:
        handoff = row.policy.send(row, target)
    state = row.state if handoff.state is None else handoff.state
    return Reply(token, handoff.keep_token, target, (row.visit.limit or 0, row.visit.then), state, row.ran)
