"""Which requests share the next iteration: GUARANTEED_NO_EVICT, prompts in chunks if that is on."""

from __future__ import annotations

from collections import deque
from typing import Any

from tensorrt_llm import _behaviour
from tensorrt_llm._double.active import Active
from tensorrt_llm._double.model import PagedModel, check_processor
from tensorrt_llm._double.requests import GenerationRequest, Response

FIRST_INTERNAL_ID = 2048


class Scheduler:
    """Requests that wait and requests that run.

    Attributes:
        waiting: not started, in the order of arrival.
        active: started.
        refused: responses of requests that can never run, to be sent.
    """

    def __init__(self, model: PagedModel, args: Any) -> None:
        self.waiting: deque[GenerationRequest] = deque()
        self.active: list[Active] = []
        self.refused: list[Response] = []
        self._model = model
        self._args = args
        self._next_id = FIRST_INTERNAL_ID

    def schedule(self) -> list[tuple[Active, int]]:
        """Requests of this iteration with their new tokens: everybody who decodes, then prompts as far as they fit."""
        ready = [active for active in self.active if not (active.in_flight and active.full)]
        if not _behaviour.true("surplus_step"):
            ready = [active for active in ready if not (active.in_flight and active.stopping)]
        rows = [(active, active.unseen) for active in ready if not active.prefilling]
        budget = self._args.max_num_tokens - len(rows)
        for active in ready:
            if active.prefilling and (share := self._share(active.unseen, budget)):
                rows.append((active, share))
                budget -= share
        while self.waiting and len(rows) < self._args.max_batch_size:
            request = self.waiting[0]
            try:
                active = self._admit(request, budget)
            except Exception as exc:
                self.refused.append(Response(request.id, error=str(exc)))
                self.waiting.popleft()
                continue
            if active is None:
                break
            self.waiting.popleft()
            self.active.append(active)
            share = self._share(active.unseen, budget)
            rows.append((active, share))
            budget -= share
            if not _behaviour.true("batched"):
                break
        return rows

    def _share(self, unseen: int, budget: int) -> int:
        """How many of a prompt's tokens run now; whole blocks unless it is all of them."""
        if unseen <= budget:
            return unseen
        size = self._model.info.block_tokens
        return budget // size * size if self._args.enable_chunked_prefill else 0

    def _admit(self, request: GenerationRequest, budget: int) -> Active | None:
        """Starts a request if its worst case fits now (GUARANTEED_NO_EVICT).

        Raises:
            ValueError: it can never run.
        """
        prompt, params = request.prompt_token_ids, request.sampling_params
        if _behaviour.true("vocabulary_checked") and not all(0 <= t < self._model.info.vocab_size for t in prompt):
            raise ValueError(f"Token ID out of range: prompt ids lie in [0, {self._model.info.vocab_size})")
        given = params.logits_processor
        processors = given if isinstance(given, list) else [given] if given is not None else []
        if not _behaviour.true("processor_list"):
            processors = processors[:1]
        for processor in processors:
            check_processor(processor)
        limit = self._model.info.max_context
        if len(prompt) >= limit:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room in max_seq_len {limit}")
        capacity = min(len(prompt) + params.max_tokens, limit) + 1
        if -(-capacity // self._model.info.block_tokens) > self._model.tree.total:
            raise ValueError(f"{capacity} tokens never fit into the KV cache")
        lease = self._model.tree.lease(prompt, capacity, request.cache_salt, request.retention)
        if lease is None:
            return None
        if not self._share(len(prompt) - lease.cached, budget):
            self._model.tree.release(lease, prompt[: lease.cached])
            return None
        params.max_tokens = min(params.max_tokens, limit - len(prompt))
        self._next_id += 1
        handle = self._model.begin(lease, capacity)
        words = [word for _, word in params.stop_words()]
        return Active(self._next_id, request, lease, handle, processors, words, list(prompt), lease.cached)
