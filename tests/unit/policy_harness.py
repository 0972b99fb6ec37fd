"""Drives a policy with fake models through entry, receive, route and send, as orchestrator and subservers do.

A fake model is a function from a token history to (logits [V], hidden [H] or None), so it needs no engine. Every model
has its own sequence of each request, and policy state is encoded and decoded at every hand-off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import torch

from tokenrouter import sampling
from tokenrouter.messages import PolicySpec, Sampling
from tokenrouter.policies import load_policy
from tokenrouter.policies.base import (
    EntryRequest,
    Handoff,
    Policy,
    PolicyContext,
    RouteBatch,
    destination_names,
)
from tokenrouter.subserver.sequence import ModelSequence

FakeModel = Callable[[list[int]], tuple[Any, Any]]
TWO = ("small", "large")


@dataclass
class Trace:
    """What happened to one request.

    Attributes:
        tokens: the response.
        writers: model of each token.
        discarded: (model, position, token) that the policy threw away.
        visits: (model, position of arrival).
        ended: whether an end id was committed.
    """

    tokens: list[int] = field(default_factory=list)
    writers: list[str] = field(default_factory=list)
    discarded: list[tuple[str, int, int]] = field(default_factory=list)
    visits: list[tuple[str, int]] = field(default_factory=list)
    ended: bool = False


@dataclass
class Request:
    """What a client sends."""

    prompt: list[int]
    seed: int = 0
    text: str = ""


class _Active:
    def __init__(self, driver: Driver, request: Request, trace: Trace) -> None:
        self.driver, self.request, self.trace = driver, request, trace
        self.sequences: dict[str, ModelSequence] = {}
        entry = driver.policy.entry(EntryRequest(request.text, request.prompt, request.seed))
        assert entry in driver.policy.visited()
        self.arrive(entry, source="", state=None)

    def arrive(self, model: str, *, source: str, state: dict[str, Any] | None) -> None:
        self.at = model
        history = [*self.request.prompt, *self.trace.tokens]
        if model not in self.sequences:
            self.sequences[model] = ModelSequence(
                model=model,
                tokens=history,
                prompt_tokens=len(self.request.prompt),
                sampling=self.driver.sampling(self.request.seed),
                policy=self.driver.policy,
            )
        sequence = self.sequences[model]
        sequence.splice(len(sequence.tokens), history[len(sequence.tokens) :])
        wire = msgspec.msgpack.decode(msgspec.msgpack.encode(state))
        sequence.arrive(visit=len(self.trace.visits), source=source, state=wire)
        visit = self.driver.policy.receive(sequence)
        assert visit.limit is None or visit.limit >= 1
        sequence.visit_limit, sequence.then = visit.limit, visit.then
        self.trace.visits.append((model, sequence.position))

    @property
    def sequence(self) -> ModelSequence:
        return self.sequences[self.at]

    @property
    def limited(self) -> bool:
        limit = self.sequence.visit_limit
        return limit is not None and self.sequence.visit_tokens + 1 >= limit

    def settle(self, token: int, target: str) -> None:
        sequence, trace = self.sequence, self.trace
        leaves = target != self.at
        handoff = self.driver.policy.send(sequence, target) if leaves and not self.limited else Handoff(keep_token=True)
        if handoff.keep_token:
            sequence.commit(token)
            trace.tokens.append(token)
            trace.writers.append(self.at)
            trace.ended = token in self.driver.end_ids
        else:
            trace.discarded.append((self.at, sequence.position, token))
        if leaves:
            self.arrive(target, source=self.at, state=handoff.state or sequence.state or None)


@dataclass
class Driver:
    """Runs requests to their end, all requests of a model as one batch."""

    policy: Policy
    models: Mapping[str, FakeModel]
    max_tokens: int = 32
    end_ids: tuple[int, ...] = ()
    temperature: float = 0.0
    max_steps: int = 100_000

    def sampling(self, seed: int) -> Sampling:
        return Sampling(max_tokens=self.max_tokens, end_ids=self.end_ids, seed=seed, temperature=self.temperature)

    def run(self, requests: Sequence[Request]) -> list[Trace]:
        traces = [Trace() for _ in requests]
        active = [_Active(self, request, trace) for request, trace in zip(requests, traces, strict=True)]
        for _ in range(self.max_steps):
            active = [a for a in active if not a.trace.ended and len(a.trace.tokens) < self.max_tokens]
            if not active:
                return traces
            for model in self.models:
                self._step(model, [a for a in active if a.at == model and not a.trace.ended])
        raise AssertionError(f"not finished after {self.max_steps} steps: a livelock?")

    def _step(self, model: str, active: list[_Active]) -> None:
        active = [a for a in active if len(a.trace.tokens) < self.max_tokens]
        if not active:
            return
        outputs = [self.models[model](list(a.sequence.tokens)) for a in active]
        logits = torch.stack([torch.as_tensor(out[0], dtype=torch.float32) for out in outputs])
        hidden = None
        if outputs[0][1] is not None:
            hidden = torch.stack([torch.as_tensor(out[1], dtype=torch.float32) for out in outputs])
        rows = [a.sequence for a in active]
        for row in rows:
            row.banned = self.policy.mask(model, logits.shape[1])
        tokens = sampling.sample(logits, rows)
        asked = [i for i, a in enumerate(active) if not a.limited]
        targets = [a.sequence.then for a in active]
        if asked:
            batch = RouteBatch(
                model=model,
                rows=[rows[i] for i in asked],
                tokens=tokens[asked],
                logits=logits[asked],
                hidden=None if hidden is None else hidden[asked],
            )
            answer = destination_names(self.policy.route(batch), batch, self.policy.models)
            for i, target in zip(asked, answer, strict=True):
                targets[i] = target
        for a, token, target in zip(active, tokens.tolist(), targets, strict=True):
            a.settle(token, target)


def make(name: str, params: dict[str, Any] | None = None, models: tuple[str, ...] = TWO, **context: Any) -> Policy:
    """A policy instance; `context`: further fields of `PolicyContext`."""
    directory = context.pop("directory", None)
    spec = PolicySpec(name, msgspec.json.encode(params or {}).decode())
    # Not through the cache: contexts that differ only in what they offer are equal.
    return load_policy(spec, PolicyContext(models, None if directory is None else str(directory), **context))


@dataclass
class FakeRow:
    """A row for tests of single decisions."""

    model: str = "small"
    source: str = ""
    seed: int = 0
    position: int = 0
    prompt_tokens: int = 0
    tokens: Sequence[int] = ()
    visit_tokens: int = 0
    state: dict[str, Any] = field(default_factory=dict)


def decide(
    policy: Policy,
    logits: Any = None,
    *,
    model: str = "small",
    hidden: Any = None,
    tokens: Sequence[int] | None = None,
    rows: Sequence[Any] | None = None,
) -> list[str]:
    """`route` of a batch given as arrays; the names it decides on."""
    count = len(logits if logits is not None else hidden)
    logits = torch.as_tensor(np.asarray(logits if logits is not None else np.zeros((count, 4))), dtype=torch.float32)
    batch = RouteBatch(
        model=model,
        rows=rows if rows is not None else [FakeRow(model=model, position=i) for i in range(count)],
        tokens=logits.argmax(-1) if tokens is None else torch.tensor(tokens),
        logits=logits,
        hidden=None if hidden is None else torch.as_tensor(hidden, dtype=torch.float32),
    )
    return destination_names(policy.route(batch), batch, policy.models)


def decide_alone(policy: Policy, logits: Any, *, hidden: Any = None, **rest: Any) -> list[str]:
    """As `decide`, but one batch per row."""
    names = []
    for i in range(len(logits)):
        one = {key: value[i : i + 1] for key, value in rest.items()}
        names += decide(policy, logits[i : i + 1], hidden=None if hidden is None else hidden[i : i + 1], **one)
    return names
