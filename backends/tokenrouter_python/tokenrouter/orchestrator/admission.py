"""Who may run: the queue in front, and the ledger of KV blocks on every replica.

A request starts when for each model that it may visit a replica has room for its longest possible response, so a
running request never waits for KV and no two can block each other. Only the head of the queue is looked at: one that
needs much is not overtaken for ever by those that need little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

from tokenrouter.entry_queue import EntryQueue, EntryQueuePolicy, Priorities
from tokenrouter.errors import ModelUnavailable, PromptTooLong
from tokenrouter.messages import ModelInfo
from tokenrouter.orchestrator.generation import Generation
from tokenrouter.orchestrator.lifecycle import State
from tokenrouter.orchestrator.replicas import Replicas


class Admission:
    """See the module's text.

    Args:
        replicas: of every model of the deployment.
        max_inflight: most requests that run at once.
        connect_timeout_ns: how long a request waits for a model that is not connected.
        queue: limits of the queue.
        priorities: of the queue.

    Attributes:
        replicas: who serves what, and KV there.
        queue: who waits.
        running: how many run.
    """

    def __init__(
        self,
        replicas: Mapping[str, Sequence[str]],
        *,
        max_inflight: int,
        connect_timeout_ns: int,
        queue: EntryQueuePolicy,
        priorities: Priorities = Priorities(),  # noqa: B008, frozen
    ) -> None:
        self._max_inflight = max_inflight
        self._connect_timeout_ns = connect_timeout_ns
        self.replicas = Replicas(replicas)
        self.queue: EntryQueue[Generation] = EntryQueue(queue, priorities)
        self.running = 0

    # --- questions ------------------------------------------------------------------------------------------------

    def has_room(self, generation: Generation) -> bool:
        """Whether a request can start now."""
        tokens = generation.kv_tokens
        return self.running < self._max_inflight and all(
            self.replicas.has_room(model, tokens) for model in generation.models
        )

    def misfit(self, generation: Generation) -> PromptTooLong | None:
        """Why a request can never run on the connected replicas, with the smallest limit; None if it can."""
        infos = [(model, self.replicas.largest(model)) for model in generation.models]
        limits = [limit for model, info in infos if info is not None for limit in _limits(model, info)]
        tokens, text = min(limits, key=itemgetter(0), default=(generation.kv_tokens, ""))
        return _too_long(generation, text) if generation.kv_tokens > tokens else None

    def check_length(self, prompt_tokens: int, *, at_least: bool = False) -> None:
        """Refuses a prompt for which no model has room, whatever the request visits, so that nothing is made of it.

        Raises:
            PromptTooLong: with the largest model's limit. Never while a model is not connected, whose limit is unknown.
        """
        limits = []
        for model in self.replicas.models:
            if (info := self.replicas.largest(model)) is None:
                return
            limits.append(min(_limits(model, info), key=itemgetter(0)))
        tokens, text = max(limits, key=itemgetter(0))
        if prompt_tokens >= tokens:
            raise PromptTooLong(
                f"prompt ({'at least ' if at_least else ''}{prompt_tokens} tokens) + max_tokens (at least 1); {text}: "
                "shorten the prompt"
            )

    def given_up(self, generation: Generation, *, now_ns: int) -> ModelUnavailable | None:
        """The error of a request that has awaited a model for the whole connect time-out; None if it goes on.

        A model that was lost has the whole time to come back, however long the request waits already.
        """
        limit_ns = now_ns - self._connect_timeout_ns
        late = [
            model
            for model in generation.awaits
            if self._is_absent(generation, model) and max(generation.since_ns, self.replicas.lost_ns(model)) <= limit_ns
        ]
        if not late:
            return None
        why = "; ".join(filter(None, (self.replicas.why(name) for name in late)))
        return ModelUnavailable(
            f"model {', '.join(map(repr, late))} is not connected (waited {self._connect_timeout_ns * 1e-9:g} s); "
            f"{why or 'is it loaded in this server?'}"
        )

    def _is_absent(self, generation: Generation, model: str) -> bool:
        """Whether no replica is there that a request can run on. One that has not started is refused if it is long."""
        if generation.state is State.WAITING:
            return self.replicas.largest(model) is None
        return not self.replicas.fits(model, generation.kv_tokens)

    # --- actions --------------------------------------------------------------------------------------------------

    def start(self, generation: Generation, *, now_ns: int) -> None:
        """A request that has room leaves the queue and takes it."""
        self.queue.discard(generation)
        self.running += 1
        generation.started_ns = now_ns
        for model in generation.models:
            pinned = self.replicas.pin(generation, model)
            assert pinned

    def release(self, generation: Generation) -> None:
        """A running request is over: its KV is free on every replica."""
        self.running -= 1
        self.replicas.release(generation)


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
