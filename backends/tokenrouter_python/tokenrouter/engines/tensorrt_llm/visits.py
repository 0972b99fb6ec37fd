"""A visit inside the worker of an engine that owns its loop: tokens are chosen and the policy is asked there.

The engine gives a row of logits after every forward pass of the request and takes the id to write next. Nothing but
such ids finds its way back, so ids are reserved (`ControlIds`). A request that leaves gets the id of its target at once
if the policy discards its token, else one step later.

The token is chosen by `tokenrouter.sampling`, so penalties, bad words and seeds work as with every other engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from tokenrouter import sampling
from tokenrouter.checkpoint import load_tokenizer
from tokenrouter.engines.tensorrt_llm.graph_router import MARK
from tokenrouter.errors import ConfigError, PolicyFailed
from tokenrouter.messages import PolicySpec, Sampling, copy_state
from tokenrouter.policies import PolicyCache, calls
from tokenrouter.policies.base import Policy, PolicyContext, PolicyParams, RouteBatch
from tokenrouter.subserver.sequence import ModelSequence

if TYPE_CHECKING:
    from torch import Tensor

_policies: dict[tuple[Any, ...], PolicyCache] = {}


class ControlIds(msgspec.Struct, frozen=True, array_like=True):
    """Ids that the model never means, by which a visit ends.

    Attributes:
        targets: by index of the model that goes on; at this model's own index, the id for a policy that failed. Empty
            if nobody leaves this model by decision.
        end: the only id at which the engine ends the request, and that of the target met most: the first other model.
            Any other id that ends the visit, an end id of the response included, is followed by it, one step later. By
            itself it says that the visit failed, if there are no targets. None if the model has no such id; then the
            engine ends the request at the end ids of the response.
        failed: says that something failed.
    """

    targets: tuple[int, ...] = ()
    end: int | None = None
    failed: int | None = None

    @classmethod
    def of(cls, policy: Policy, model: str, unused: Sequence[int]) -> ControlIds:
        """Those of a policy's requests.

        Args:
            policy: of the request.
            model: where it is.
            unused: ids that the model never means.

        Raises:
            ConfigError: there are too few.
        """
        if not policy.decides(model):
            first = next(iter(unused), None)
            return cls((), first, first)
        needed = len(policy.models)
        if len(unused) < needed:
            raise ConfigError(
                f"model {model!r}: policy {policy.name!r} ends visits by {needed} token ids that mean nothing else, "
                f"and {len(unused)} are known to be unused; name some as handoff_ids in model.yaml, such as reserved "
                "tokens"
            )
        targets, own = tuple(unused[:needed]), policy.models.index(model)
        return cls(targets, targets[0 if own else 1], targets[own])

    @property
    def all(self) -> set[int]:
        """Every one of them."""
        return {*self.targets, *(() if self.end is None else (self.end,))}

    def closing(self, end_ids: Sequence[int]) -> frozenset[int]:
        """What `end` follows, in a response with these end ids."""
        return frozenset() if self.end is None else frozenset({*end_ids, *self.targets} - {self.end})


class Task(msgspec.Struct, frozen=True, array_like=True):
    """All that the worker is told of a visit; see `sequence.ModelSequence`.

    Attributes:
        checkpoint: folder whose tokenizer policies may use.
        directory: of the deployment, for paths in policy parameters.
        banned: ids never chosen, reserved ones included.
        decides: whether the policy is asked; otherwise the visit only ends by its limit or with the response.
        mark: column where the model's own graph says that the request leaves, or None.
        marked: whether this visit follows that mark, rather than asking the policy.
    """

    model: str
    models: tuple[str, ...]
    checkpoint: str
    directory: str | None
    policy: PolicySpec
    sampling: Sampling
    prompt_tokens: int
    source: str
    state: dict[str, Any]
    limit: int | None
    then: str
    banned: tuple[int, ...]
    ids: ControlIds
    decides: bool
    mark: int | None
    marked: bool

    @classmethod
    def of(cls, sequence: ModelSequence, *, checkpoint: Path, ids: ControlIds, mark: int | None) -> Task:
        """The visit that begins now, of a sequence that has arrived; copies are taken."""
        policy, model = sequence.policy, sequence.model
        assert sequence.spec is not None
        limit = None if sequence.then == model else sequence.visit_limit
        return cls(
            model=model,
            models=policy.models,
            checkpoint=str(checkpoint),
            directory=policy.context.directory,
            policy=sequence.spec,
            sampling=sequence.sampling,
            prompt_tokens=sequence.prompt_tokens,
            source=sequence.source,
            state=copy_state(sequence.state),
            limit=limit,
            then=sequence.then,
            banned=tuple({*sequence.banned, *ids.all}),
            ids=ids,
            decides=policy.decides(model) and limit != 1,
            mark=mark,
            marked=policy.needs_hidden(model),
        )

    def most_tokens(self, position: int) -> int:
        """How many tokens the visit may write at most, from this position of the response on."""
        left = self.sampling.max_tokens - position
        return left if self.limit is None else min(left, self.limit)

    def handoff_id(self, target: str) -> int:
        """The reserved id of a target."""
        return self.ids.targets[self.models.index(target)]


class WorkerVisit:
    """See the module's text.

    Args:
        task: what the worker is told.
        history: prompt and committed tokens at the start of the visit.
    """

    def __init__(self, task: Task, history: Sequence[int]) -> None:
        self._task = task
        self._start = len(history)
        self._closing = task.ids.closing(task.sampling.end_ids)
        self._sequence: ModelSequence | None = None
        # Length of the history at which a kept token was chosen that the hand-off follows, and the hand-off's id.
        self._after: tuple[int, int] | None = None

    def choose(self, row: Tensor, history: Sequence[int]) -> Tensor:
        """[1] int64, the id to leave in a row [1, V].

        A long prompt is prefilled in chunks, with a call after each that nothing comes of: so everything here follows
        from the history, and a second call with the same one starts over.
        """
        task = self._task
        if len(history) > self._start and history[-1] in self._closing:
            return _only(task.ids.end, row)
        if self._after is not None and self._after[0] < len(history):
            return _only(self._after[1], row)
        self._after = None
        with torch.inference_mode():
            return self._choose(row, history)

    def _choose(self, row: Tensor, history: Sequence[int]) -> Tensor:
        task = self._task
        sequence = self._caught_up(history, str(row.device))
        leaves = None
        if task.mark is not None:
            leaves = row[0, task.mark] > MARK / 2
            row[0, task.mark] = float("-inf")
        logits = row.float()
        chosen = sampling.sample(logits, [sequence])
        if not task.decides or sequence.at_limit:
            return chosen
        target = self._target(sequence, chosen, logits, leaves)
        if target == task.model:
            return chosen
        if self._keeps(sequence, target):
            self._after = (len(history), task.handoff_id(target))
            return chosen
        return _only(task.handoff_id(target), row)

    def _target(self, sequence: ModelSequence, chosen: Tensor, logits: Tensor, leaves: Tensor | None) -> str:
        task = self._task
        if task.marked:
            return sequence.policy.other(task.model) if leaves is not None and bool(leaves) else task.model
        return calls.route(sequence.policy, RouteBatch(task.model, [sequence], chosen, logits))[0]

    def _keeps(self, sequence: ModelSequence, target: str) -> bool:
        """Whether the token just chosen is kept.

        Raises:
            PolicyFailed: the policy changed its state, which would be lost here.
        """
        handoff = calls.send(sequence, target)
        if not sequence.policy.rebuilds_state and handoff.state != self._task.state:
            raise PolicyFailed(
                f"policy {sequence.policy.name!r} changes a request's state in route or send, which cannot leave the "
                "engine's worker. Set `rebuilds_state` if `receive` can rebuild it from the tokens"
            )
        return handoff.keep_token

    def _caught_up(self, history: Sequence[int], device: str) -> ModelSequence:
        """The sequence as of `history`, with the state from which it was left."""
        task, sequence = self._task, self._sequence
        if sequence is None:
            sequence = self._sequence = _sequence(task, history, device)
            self._state = copy_state(task.state)
        elif len(history) > len(sequence.tokens):
            self._state = copy_state(sequence.state)
            sequence.tokens.extend(history[len(sequence.tokens) :])
            sequence.visit_tokens = len(history) - self._start
        sequence.state = copy_state(self._state)
        return sequence


def _only(token: int | None, row: Tensor) -> Tensor:
    return torch.tensor([token], device=row.device)


def _sequence(task: Task, history: Sequence[int], device: str) -> ModelSequence:
    policy = _policy(task, device) if task.decides else Policy(PolicyParams(), PolicyContext(task.models))
    sequence = ModelSequence(
        model=task.model,
        tokens=history,
        prompt_tokens=task.prompt_tokens,
        sampling=task.sampling,
        policy=policy,
    )
    sequence.banned = task.banned
    sequence.arrive(visit=0, source=task.source, state=task.state)
    sequence.visit_limit, sequence.then = task.limit, task.then
    return sequence


def _policy(task: Task, device: str) -> Policy:
    """The policy, shared by all visits of this worker."""
    key = (task.models, task.directory, task.checkpoint, device)
    if key not in _policies:
        tokenizer = load_tokenizer(Path(task.checkpoint))
        context = PolicyContext(task.models, task.directory, tokenizer=tokenizer, device=device)
        _policies[key] = PolicyCache(context)
    return _policies[key].get(task.policy)
