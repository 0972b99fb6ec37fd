"""Which requests share the next iteration: GUARANTEED_NO_EVICT, then tokens by microBatchScheduler.cpp."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from tensorrt_llm import _behaviour
from tensorrt_llm._double.active import Active, check_processor
from tensorrt_llm._double.model import PagedModel
from tensorrt_llm.executor.result import Response

FIRST_INTERNAL_ID = 2048


class Scheduler:
    """Requests that wait and requests that are active.

    Attributes:
        waiting: beyond the most requests that are active at once, in the order of arrival.
        active: in the order of arrival; those that have a lease have started.
    """

    def __init__(self, model: PagedModel, args: Any) -> None:
        self.waiting: deque[Any] = deque()
        self.active: list[Active] = []
        self._model = model
        self._args = args
        self._next_id = FIRST_INTERNAL_ID

    def activate(self) -> list[Response]:
        """Fills up the active requests; answers to those that are refused."""
        refused = []
        while self.waiting and len(self.active) < self._args.max_batch_size:
            request = self.waiting.popleft()
            try:
                self._check(request)
            except ValueError as exc:
                refused.append(Response(request.id, error=str(exc)))
                continue
            self._next_id += 1
            processor = request.sampling_params.logits_processor
            processors = [] if processor is None else [processor]
            self.active.append(Active(self._next_id, request, processors, list(request.prompt_token_ids)))
        return refused

    def _check(self, request: Any) -> None:
        """Raises ValueError for what can never run."""
        prompt, info = request.prompt_token_ids, self._model.info
        if _behaviour.true("vocabulary_checked") and not all(0 <= t < info.vocab_size for t in prompt):
            raise ValueError(f"Token ID out of range: prompt ids lie in [0, {info.vocab_size})")
        if request.sampling_params.logits_processor is not None:
            check_processor(request.sampling_params.logits_processor)
        if len(prompt) >= info.max_context:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room in max_seq_len {info.max_context}")
        request.max_tokens = min(request.max_tokens, info.max_context - len(prompt))
        if self._blocks(request) > self._model.tree.total:
            raise ValueError(f"{self._blocks(request)} blocks never fit into the KV cache")

    def schedule(self) -> list[Active]:
        """Requests of this iteration, each with its `chunk`; those that start get their KV here."""
        most, chunked = self._args.max_num_tokens, self._args.enable_chunked_prefill
        rows: list[Active] = []
        contexts: list[Active] = []
        tokens = 0
        for active in self._fitting():
            active.chunk = active.remaining if active.prefilling else 1
            if not active.prefilling or not chunked:
                charged = active.chunk - self._known(active)
                if tokens + charged > most:
                    break  # and whoever is behind it waits as well, decoding or not
                tokens += charged
                rows.append(active)
            else:
                contexts.append(active)
            if len(rows) + len(contexts) >= self._args.max_batch_size or not _behaviour.true("batched"):
                break
        if sum(active.chunk - self._known(active) for active in contexts) > most - tokens:
            self._divide(contexts, most - tokens)
        rows += [active for active in contexts if active.chunk]
        for active in rows:
            if active.lease is None:
                self._start(active)
        return rows

    def _known(self, active: Active) -> int:
        """Tokens of the prompt that are not charged because they are known to be cached."""
        if active.lease is not None or _behaviour.true("whole_prompt_charged"):
            return 0
        return self._model.tree.cached(active.request)

    def _fitting(self) -> Iterator[Active]:
        """Whose worst case fits beside that of all who have started; the first that does not ends the list."""
        free = self._model.tree.available
        for active in self.active:
            if active.lease is None:
                free -= self._blocks(active.request)
                if free < 0:
                    return
            yield active

    def _blocks(self, request: Any) -> int:
        return -(-(len(request.prompt_token_ids) + request.max_tokens) // self._model.info.block_tokens)

    def _divide(self, contexts: list[Active], budget: int) -> None:
        """Sets chunks of prompts that do not fit together, in whole blocks unless a prompt ends."""
        size = self._model.info.block_tokens
        given = self._args.scheduler_config.context_chunking_policy
        policy = getattr(given, "name", given)
        for active in contexts:
            active.chunk = 0
        if policy != "EQUAL_PROGRESS" or not _behaviour.true("equal_progress"):
            for active in contexts:
                fits = active.remaining - self._known(active) <= budget
                active.chunk = active.remaining if fits else budget // size * size
                budget -= active.chunk
            return
        grown = True
        while grown:
            grown = False
            for active in contexts:
                more = min(size, active.remaining - active.chunk)
                if 0 < more <= budget:
                    active.chunk, budget, grown = active.chunk + more, budget - more, True

    def _start(self, active: Active) -> None:
        """Leases blocks; what is found of the prompt moves the chunk on, to the end of a block or of the prompt."""
        tree, size = self._model.tree, self._model.info.block_tokens
        capacity = self._blocks(active.request) * size
        active.lease = tree.lease(active.request, self._blocks(active.request))
        active.handle = self._model.begin(active.lease, capacity)
        active.computed = active.lease.cached
        end = active.computed + active.chunk
        if end < active.prompt_length:
            active.chunk = end // size * size - active.computed
        else:
            active.chunk = active.remaining
