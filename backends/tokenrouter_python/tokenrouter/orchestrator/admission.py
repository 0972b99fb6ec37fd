"""Who may run: the queue in front, and a ledger of KV blocks on every model.

A request starts when all models it may visit have room for its longest possible response, so a running request never
waits for KV and no two can block each other. Only the head of the queue is looked at: one that needs much is not
overtaken for ever by those that need little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from tokenrouter.engines.base import blocks_needed
from tokenrouter.entry_queue import EntryQueue, EntryQueuePolicy, Priorities
from tokenrouter.errors import ModelUnavailable, PromptTooLong
from tokenrouter.messages import ModelInfo
from tokenrouter.orchestrator.generation import Generation


@dataclass(slots=True)
class _Pool:
    """KV of one model. `info` is None while it is not connected; `lost_ns` is when it was last lost."""

    info: ModelInfo | None = None
    reserved_blocks: int = 0
    lost_ns: int = 0

    def has_room(self, tokens: int) -> bool:
        """Whether so many tokens can be reserved now."""
        info = self.info
        return info is not None and self.reserved_blocks + blocks_needed(tokens, info.block_tokens) <= info.kv_blocks


class Admission:
    """See the module's text.

    Args:
        models: names of the deployment's models.
        max_inflight: most requests that run at once.
        connect_timeout_ns: how long a request waits for a model that is not connected.
        queue: limits of the queue.
        priorities: of the queue.

    Attributes:
        queue: who waits.
        running: how many run.
    """

    def __init__(
        self,
        models: Sequence[str],
        *,
        max_inflight: int,
        connect_timeout_ns: int,
        queue: EntryQueuePolicy,
        priorities: Priorities = Priorities(),  # noqa: B008, frozen
    ) -> None:
        self._max_inflight = max_inflight
        self._connect_timeout_ns = connect_timeout_ns
        self._pools = {name: _Pool() for name in models}
        self.queue: EntryQueue[Generation] = EntryQueue(queue, priorities)
        self.running = 0

    # --- models ---------------------------------------------------------------------------------------------------

    def connected(self, model: str, info: ModelInfo) -> None:
        """A model is there. What is reserved on it stays so: those requests will come to it."""
        self._pools[model].info = info

    def disconnected(self, model: str, *, now_ns: int) -> None:
        """A model is gone."""
        self._pools[model].info = None
        self._pools[model].lost_ns = now_ns

    def reserved_blocks(self, model: str) -> int:
        """KV blocks reserved on a model for running requests."""
        return self._pools[model].reserved_blocks

    # --- questions ------------------------------------------------------------------------------------------------

    def has_room(self, generation: Generation) -> bool:
        """Whether a request can start now."""
        tokens = generation.kv_tokens
        return self.running < self._max_inflight and all(
            self._pools[name].has_room(tokens) for name in generation.models
        )

    def misfit(self, generation: Generation) -> PromptTooLong | None:
        """Why a request can never run on the connected models, with the smallest limit; None if it can."""
        infos = [(name, self._pools[name].info) for name in generation.models]
        limits = [limit for name, info in infos if info is not None for limit in _limits(name, info)]
        tokens, text = min(limits, key=itemgetter(0), default=(generation.kv_tokens, ""))
        return _too_long(generation, text) if generation.kv_tokens > tokens else None

    def given_up(self, generation: Generation, *, now_ns: int) -> ModelUnavailable | None:
        """The error of a request that has awaited a model for the whole connect time-out; None if it goes on.

        A model that was lost has the whole time to come back, however long the request waits already.
        """
        limit_ns = now_ns - self._connect_timeout_ns
        pools = [(name, self._pools[name]) for name in generation.awaits]
        late = [
            name for name, pool in pools if pool.info is None and max(generation.since_ns, pool.lost_ns) <= limit_ns
        ]
        if not late:
            return None
        return ModelUnavailable(
            f"model {', '.join(map(repr, late))} is not connected (waited {self._connect_timeout_ns * 1e-9:g} s); "
            "is it loaded in this server?"
        )

    # --- actions --------------------------------------------------------------------------------------------------

    def start(self, generation: Generation, *, now_ns: int) -> None:
        """A request that has room leaves the queue and takes it."""
        self.queue.discard(generation)
        self.running += 1
        generation.started_ns = now_ns
        for name in generation.models:
            pool = self._pools[name]
            assert pool.info is not None
            blocks = generation.reserved[name] = blocks_needed(generation.kv_tokens, pool.info.block_tokens)
            pool.reserved_blocks += blocks
            generation.emulated |= pool.info.emulated

    def release(self, generation: Generation) -> None:
        """A running request is over: its KV is free on every model."""
        self.running -= 1
        for name, blocks in generation.reserved.items():
            self._pools[name].reserved_blocks -= blocks


def _limits(model: str, info: ModelInfo) -> list[tuple[int, str]]:
    """Most tokens that a sequence may have on a model, and what says so."""
    pool_tokens = info.kv_blocks * info.block_tokens
    blocks = f"({info.kv_blocks} blocks of {info.block_tokens})"
    return [
        (info.max_context, f"model {model!r} has a context of {info.max_context} tokens"),
        (pool_tokens, f"the KV pool of model {model!r} holds {pool_tokens} tokens {blocks}"),
    ]


def _too_long(generation: Generation, limit: str) -> PromptTooLong:
    prompt, max_tokens = len(generation.request.tokens), generation.request.sampling.max_tokens
    return PromptTooLong(
        f"prompt ({prompt} tokens) + max_tokens ({max_tokens}) = {generation.kv_tokens} tokens; {limit}: "
        "shorten the prompt or lower max_tokens"
    )
