"""One LLM's server without Triton: in-flight batching over calls of one token each, on a paged prefix cache."""

from __future__ import annotations

import logging
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from perf.baselines.standard.decide import CallRow, decide
from perf.baselines.standard.paged import PagedEngine
from perf.baselines.standard.prefix_cache import Lease, PrefixCache
from perf.baselines.standard.wire import TOKEN_BYTES, Call, Reply
from tokenrouter.engines.base import EngineRow, blocks_needed
from tokenrouter.policies import PolicyCache
from tokenrouter.policies.base import Policy

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A call that came.

    Attributes:
        ids: token ids, INT32 bytes.
        call: see `Call`.
        ticket: whoever wants the answer.
    """

    ids: bytes
    call: Call
    ticket: Any


@dataclass(eq=False, slots=True)
class _Running:
    """An admitted call; `done` of its tokens have KV."""

    arrival: Arrival
    row: CallRow
    lease: Lease
    handle: Any
    done: int

    @property
    def unseen(self) -> int:
        return len(self.arrival.ids) // TOKEN_BYTES - self.done

    def take(self, share: int) -> EngineRow:
        ids = array("i", self.arrival.ids[self.done * TOKEN_BYTES : (self.done + share) * TOKEN_BYTES])
        return EngineRow(self.handle, ids.tolist(), emit=int(share == self.unseen))


class Scheduler:
    """Every step serves all calls that are ready, extends and decodes mixed, up to the engine's limits.

    Args:
        name: the model.
        engine: see `PagedEngine`.
        policies: of the deployment, at this model.
    """

    def __init__(self, name: str, engine: PagedEngine, policies: PolicyCache) -> None:
        info = engine.info
        self.name = name
        self.cache = PrefixCache(info.kv_blocks, info.block_tokens)
        self._engine = engine
        self._info = info
        self._policies = policies
        self._banned: WeakKeyDictionary[Policy, Sequence[int]] = WeakKeyDictionary()
        self._waiting: deque[Arrival] = deque()
        self._running: list[_Running] = []
        self._over: list[_Running] = []

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def add(self, arrival: Arrival) -> None:
        self._waiting.append(arrival)

    def step(self) -> list[tuple[Any, Reply | Exception]]:
        """One forward pass for what is ready. Returns the answers by ticket; call `tidy` once they are on their way."""
        answers: list[tuple[Any, Reply | Exception]] = list(self._admit())
        rows = list(self._share_out())
        if not rows:
            return answers
        try:
            result = self._engine.step([running.take(share) for running, share in rows])
            for running, share in rows:
                running.done += share
                running.row.ran += share
            self._over = [running for running, _ in rows if not running.unseen]
            if self._over:
                replies = decide(self.name, [running.row for running in self._over], result)
                answers += [(r.arrival.ticket, reply) for r, reply in zip(self._over, replies, strict=True)]
        except Exception as exc:
            log.exception("a step of %s failed", self.name)
            self._over = [running for running, _ in rows]
            for running in self._over:
                running.done = 0
            answers += [(running.arrival.ticket, exc) for running in self._over]
        return answers

    def tidy(self) -> None:
        """Puts the KV of answered calls into the prefix cache."""
        for running in self._over:
            self._running.remove(running)
            good = self._engine.close(running.handle)
            self.cache.release(running.lease, running.done if good else 0)
        self._over = []

    def _admit(self) -> Iterator[tuple[Any, Exception]]:
        """Admits calls in order while there is room; yields those that can never be served."""
        while self._waiting and len(self._running) < self._info.max_batch:
            arrival = self._waiting[0]
            try:
                running = self._start(arrival)
            except Exception as exc:
                yield arrival.ticket, exc
            else:
                if running is None:
                    return
                self._running.append(running)
            self._waiting.popleft()

    def _start(self, arrival: Arrival) -> _Running | None:
        """An admitted call, or None if others have to end first."""
        length = len(arrival.ids) // TOKEN_BYTES
        if length > self._info.max_context or blocks_needed(length, self._info.block_tokens) > self._info.kv_blocks:
            pool = self._info.kv_blocks * self._info.block_tokens
            raise ValueError(
                f"{length} tokens; model {self.name!r} has a context of {self._info.max_context} and KV for {pool}"
            )
        lease = self.cache.acquire(arrival.ids)
        if lease is None:
            return None
        try:
            # After the lease, since a policy's `receive` may change its state and is called once.
            policy = self._policies.get(arrival.call.policy)
            row = CallRow(self.name, arrival.ids, arrival.call, policy, self._banned_by(policy))
        except Exception:
            self.cache.release(lease, lease.cached)
            raise
        handle = self._engine.open_on(
            lease.blocks, arrival.ids, cached=lease.cached, prompt_tokens=arrival.call.prompt_tokens
        )
        return _Running(arrival, row, lease, handle, lease.cached)

    def _banned_by(self, policy: Policy) -> Sequence[int]:
        if policy not in self._banned:
            self._banned[policy] = policy.mask(self.name, self._info.vocab_size)
        return self._banned[policy]

    def _share_out(self) -> Iterator[tuple[_Running, int]]:
        """New tokens per call under the token budget: decodes first, then extends in the order of arrival."""
        budget = self._info.max_num_tokens
        for running in sorted(self._running, key=lambda running: running.unseen > 1):
            share = min(running.unseen, budget)
            if share == 0:
                return
            budget -= share
            yield running, share
