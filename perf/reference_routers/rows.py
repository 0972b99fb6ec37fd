"""What a comparison says, and the requests that it routes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokenrouter.messages import copy_state
from tokenrouter.policies.base import EntryRequest, Handoff, Policy, RouteBatch, destination_names


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        source: whose code.
        what: class, strategy or function.
        settings: which of its variants.
        compared: how many values, or decisions.
        difference: largest absolute difference of the values (None if there are none).
        different: decisions that differ (None if there are none).
    """

    source: str
    what: str
    settings: str
    compared: int
    difference: float | None = None
    different: int | None = None


@dataclass
class RequestRow:
    """A request as a policy sees it; satisfies `policies.base.Row`."""

    model: str = "small"
    source: str = ""
    seed: int = 0
    prompt_tokens: int = 0
    tokens: Sequence[int] = ()
    visit_tokens: int = 0
    state: dict[str, Any] = field(default_factory=dict)

    @property
    def position(self) -> int:
        return len(self.tokens) - self.prompt_tokens


def largest(ours: Any, theirs: Any) -> float:
    """Largest absolute difference."""
    return float(np.max(np.abs(np.asarray(ours, dtype=np.float64) - np.asarray(theirs, dtype=np.float64))))


def shuffled_batches(requests: int, positions: int, seed: int) -> Iterator[list[tuple[int, int]]]:
    """(request, position) in batches of changing composition; every request's positions in order, each once."""
    rng = random.Random(seed)
    following = [0] * requests
    while any(position < positions for position in following):
        unfinished = [i for i in range(requests) if following[i] < positions]
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        yield [(i, following[i]) for i in chosen]
        for i in chosen:
            following[i] += 1


def decisions(policy: Policy, logits: Tensor, hidden: Tensor | None, tokens: Tensor, *, seed: int = 0) -> Tensor:
    """Who leaves, when requests are routed in batches of changing composition.

    Args:
        policy: of two models.
        logits: [R, T, V] by request and position.
        hidden: [R, T, H] or None.
        tokens: [R, T].
        seed: of the batches.

    Returns:
        [R, T] bool. States travel between all decisions, as they do at hand-offs.
    """
    count, length = tokens.shape
    leaves = torch.zeros(count, length, dtype=torch.bool)
    rows = [RequestRow() for _ in range(count)]
    for batch in shuffled_batches(count, length, seed):
        asked, at = [rows[i] for i, _ in batch], tuple(torch.tensor(batch).T)
        given = RouteBatch("small", asked, tokens[at], logits[at], None if hidden is None else hidden[at])
        names = destination_names(policy.route(given), given, policy.models)
        for (i, position), name in zip(batch, names, strict=True):
            leaves[i, position] = name != "small"
            rows[i].state = copy_state(rows[i].state)
            rows[i].tokens = [*rows[i].tokens, 0]
    return leaves


World = Callable[[str, Sequence[int]], Tensor]
"""From a model and a token history to its next-token logits [V]."""


def respond(
    policy: Policy, world: World, prompt: Sequence[int], *, max_tokens: int, end_id: int
) -> Iterator[tuple[str, int]]:
    """One greedy response, token by token, with its writers."""
    tokens, state = list(prompt), dict[str, Any]()
    at, source = policy.entry(EntryRequest("", prompt, 0)), ""
    while True:
        row = RequestRow(at, source, 0, len(prompt), tokens, 0, state)
        visit, target = policy.receive(row), at
        while target == at:
            logits = world(at, tokens)[None]
            allowed = logits.clone()
            allowed[:, list(policy.mask(at, logits.shape[1]))] = float("-inf")
            chosen = allowed.argmax(-1)
            handoff = Handoff(keep_token=True)
            if visit.limit is not None and row.visit_tokens + 1 >= visit.limit:
                target = visit.then
            else:
                batch = RouteBatch(at, [row], chosen, logits)
                (target,) = destination_names(policy.route(batch), batch, policy.models)
                handoff = policy.send(row, target) if target != at else handoff
            if handoff.keep_token:
                tokens.append(int(chosen))
                row.visit_tokens += 1
                yield at, tokens[-1]
                if tokens[-1] == end_id or row.position >= max_tokens:
                    return
        at, source, state = target, at, copy_state(row.state)
