"""Greedy decoding of many sequences with one engine: a full batch at all times, whatever their lengths."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenrouter.engines.base import Engine, EngineRow, blocks_needed


@dataclass
class _Run:
    """A sequence in work: `pending` tokens are not in the engine's cache yet, `limit` is the most it may write."""

    index: int
    handle: Any
    pending: list[int]
    limit: int
    output: list[int] = field(default_factory=list)


def greedy(
    engine: Engine,
    prefixes: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    end_ids: Collection[int],
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[int]]:
    """Continues every prefix until an end id, `max_tokens` tokens, or the engine's longest sequence.

    Args:
        progress: called with 1 for each finished sequence.

    Returns:
        New tokens of each prefix, the end id included.
    """
    waiting = deque(range(len(prefixes)))
    outputs: list[list[int]] = [[] for _ in prefixes]
    active: list[_Run] = []
    while waiting or active:
        while waiting and (not active or _fits(engine, len(active), len(prefixes[waiting[0]]) + max_tokens)):
            active.append(_open(engine, waiting.popleft(), prefixes, max_tokens))
        running = []
        for run, token in _step(engine, active):
            if token is not None:
                run.output.append(token)
                run.pending = [token]
            if token is None or not (token in end_ids or len(run.output) >= run.limit):
                running.append(run)
                continue
            engine.close(run.handle)
            outputs[run.index] = run.output
            progress(1)
        active = running
    return outputs


def _fits(engine: Engine, active: int, tokens: int) -> bool:
    """Whether one more sequence of at most this many tokens has a place in the batch and KV blocks."""
    info = engine.info
    needed = blocks_needed(min(tokens, info.max_context), info.block_tokens)
    return active < info.max_batch and needed <= info.kv_blocks - engine.blocks_leased


def _open(engine: Engine, index: int, prefixes: Sequence[Sequence[int]], max_tokens: int) -> _Run:
    prefix = list(prefixes[index])
    limit = min(max_tokens, engine.info.max_context - len(prefix))
    handle = engine.open(kv_tokens=len(prefix) + limit, prompt_tokens=len(prefix))
    return _Run(index, handle, prefix, limit)


def _step(engine: Engine, active: Sequence[_Run]) -> list[tuple[_Run, int | None]]:
    budget = engine.info.max_num_tokens
    shares: list[int] = []
    # Every run gets at least one token: the budget of a step is not below the largest batch.
    for place, run in enumerate(active):
        shares.append(min(len(run.pending), budget - (len(active) - place - 1)))
        budget -= shares[-1]
    rows = [
        EngineRow(run.handle, run.pending[:share], emit=int(share == len(run.pending)))
        for run, share in zip(active, shares, strict=True)
    ]
    tokens = iter(engine.step(rows).logits.argmax(-1).tolist())
    answers: list[tuple[_Run, int | None]] = []
    for run, share, row in zip(active, shares, rows, strict=True):
        run.pending = run.pending[share:]
        answers.append((run, next(tokens) if row.emit else None))
    return answers
