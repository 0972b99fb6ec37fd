"""Calls of a policy's methods as the runtime makes them: answers are checked, errors name the policy and the method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tokenrouter.errors import PolicyFailed
from tokenrouter.messages import Measure, copy_state
from tokenrouter.policies.base import Handoff, Policy, RouteBatch, Visit, destination_names

if TYPE_CHECKING:
    from tokenrouter.subserver.sequence import ModelSequence


class policy_errors:
    """Turns whatever a policy raises into `PolicyFailed` that names the policy and the method."""

    __slots__ = ("_method", "_policy")

    def __init__(self, policy: Policy, method: str) -> None:
        self._policy = policy
        self._method = method

    def __enter__(self) -> None:
        """Nothing to set up."""

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, traceback: object) -> None:
        if exc is not None and not isinstance(exc, KeyboardInterrupt):
            name = self._policy.name or type(self._policy).__name__
            raise PolicyFailed(f"policy {name!r}, {self._method}: {type(exc).__name__}: {exc}") from exc


def mask(policy: Policy, model: str, vocab_size: int) -> Sequence[int]:
    """Ids that `model` must not sample, all within its logits."""
    with policy_errors(policy, "mask"):
        banned = policy.mask(model, vocab_size)
        if len(banned) and not 0 <= min(banned) <= max(banned) < vocab_size:
            raise PolicyFailed(f"mask returned ids from {min(banned)} to {max(banned)}; they lie in [0, {vocab_size})")
        return banned


def receive(sequence: ModelSequence) -> Visit:
    """How long the visit lasts."""
    with policy_errors(sequence.policy, "receive"):
        plan = sequence.policy.receive(sequence)
        if plan.limit is not None and (plan.limit < 1 or plan.then not in sequence.policy.models):
            raise PolicyFailed(f"receive returned {plan}; a limit is at least 1 and names a model to go on with")
        return plan


def enter(sequence: ModelSequence, *, source: str) -> None:
    """A visit begins: its limit is asked for."""
    sequence.source = source
    sequence.visit_tokens = 0
    visit = receive(sequence)
    sequence.visit_limit, sequence.then = visit.limit, visit.then


def route(policy: Policy, batch: RouteBatch) -> list[str]:
    """The model that goes on, per row."""
    with policy_errors(policy, "route"):
        return destination_names(policy.route(batch), batch, policy.models)


def explain(policy: Policy, batch: RouteBatch) -> Sequence[Sequence[Measure]]:
    """What the policy looks at, per row."""
    with policy_errors(policy, "explain"):
        found = policy.explain(batch)
        if len(found) != len(batch):
            raise PolicyFailed(f"explain returned {len(found)} entries for {len(batch)} requests")
        return found


def remembers(policy: Policy, model: str) -> bool:
    """Whether the state of a request that stays has to be kept elsewhere too."""
    with policy_errors(policy, "remembers"):
        return policy.remembers(model)


def kept_state(sequence: ModelSequence) -> dict[str, Any]:
    """A copy of the state of a request that stays."""
    with policy_errors(sequence.policy, "remembers"):
        return copy_state(sequence.state)


def send(sequence: ModelSequence, target: str) -> Handoff:
    """What travels, with a copy of the state as the other side will see it; the state is never None."""
    with policy_errors(sequence.policy, "send"):
        handoff = Handoff(keep_token=True) if sequence.at_limit else sequence.policy.send(sequence, target)
        state = sequence.state if handoff.state is None else handoff.state
        # Here, because a state that cannot travel is this policy's failure and must not end the loop. The copy also
        # keeps the two sides apart where no wire does.
        return Handoff(bool(handoff.keep_token), copy_state(state))
