"""The executor's loop: in-flight batching, one forward pass over all active requests per iteration."""

from __future__ import annotations

import pickle
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm import _behaviour
from tensorrt_llm._double.kv import Lease
from tensorrt_llm._double.model import PagedModel, Row, check_processor
from tensorrt_llm._double.requests import GenerationRequest, Response
from tensorrt_llm._double.sampler import TorchSampler


@dataclass(slots=True, eq=False)
class Active:
    """A request inside the executor.

    Attributes:
        internal_id: what processors get as req_id; not the client's id.
        tokens: prompt and generated tokens, without one whose iteration is not settled yet.
        in_flight: sampled tokens that are not settled yet; at most one, and only with the overlap scheduler.
        computed: tokens whose KV is computed.
        sent: generated tokens in earlier responses.
    """

    internal_id: int
    request: GenerationRequest
    lease: Lease
    handle: Any
    processors: list[Any]
    stop_words: list[list[int]]
    tokens: list[int]
    computed: int
    in_flight: list[int] = field(default_factory=list)
    sent: int = 0
    iterations: int = 0
    cancelled: bool = False
    logprobs: list[Any] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    additional: dict[str, list[Tensor]] = field(default_factory=dict)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.request.prompt_token_ids) :]

    @property
    def unseen(self) -> int:
        """Tokens whose KV is not computed."""
        return len(self.tokens) + len(self.in_flight) - self.computed

    @property
    def prefilling(self) -> bool:
        """Whether part of the prompt is still to be computed."""
        return self.computed < len(self.request.prompt_token_ids)

    @property
    def full(self) -> bool:
        """Whether the tokens in flight are the last that it may have."""
        return len(self.generated) + len(self.in_flight) >= self.request.sampling_params.max_tokens


class ThreadWorker:
    """The loop in a thread of this process."""

    def __init__(self, args: Any, post: Callable[[list[Response]], None]) -> None:
        self.loop = Loop(PagedModel.load(args), args, post)
        self.loop.thread.start()

    def put(self, item: Any) -> None:
        """Sends an item to the loop."""
        self.loop.inbox.put(item)

    def close(self) -> None:
        """Ends the loop."""
        self.loop.inbox.put(None)
        self.loop.thread.join()


class Loop:
    """Runs in its own thread; talk to it through `inbox`.

    Args:
        model: the model and its blocks.
        args: the LLM's arguments.
        post: called in the loop's thread with the responses of an iteration.
    """

    def __init__(self, model: PagedModel, args: Any, post: Callable[[list[Response]], None]) -> None:
        self.inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.iterations: list[tuple[int, int]] = []
        self._model = model
        self._args = args
        self._post = post
        self._overlap = not args.disable_overlap_scheduler
        self._sampler = TorchSampler()
        self._waiting: deque[GenerationRequest] = deque()
        self._active: list[Active] = []
        self._unsettled: list[tuple[Active, int]] = []
        self._cancelled: set[int] = set()
        self._next_id = 2048
        self._late: list[Active] = []
        self._responses: list[Response] = []
        self._running = True
        self.thread = threading.Thread(target=self._run, name="fake-tensorrt-llm", daemon=True)

    @torch.inference_mode()
    def _run(self) -> None:
        while self._running:
            self._fetch()
            if self._running:
                self._guarded()
            responses, self._responses = self._responses, []
            if responses:
                self._post(responses)

    def _guarded(self) -> None:
        try:
            self._iterate()
        except Exception as exc:  # a fault of the double: everybody is told, nobody waits for ever
            ids = [active.request.id for active in self._active] + [request.id for request in self._waiting]
            self._responses += [Response(request_id, error=f"the double failed: {exc!r}") for request_id in ids]
            self._active, self._unsettled = [], []
            self._waiting.clear()

    def _fetch(self) -> None:
        """Takes what has come; sleeps only when there is nothing to do. The first message of an idle loop wakes it."""
        idle = not self._active and not self._waiting and not self._unsettled
        while True:
            try:
                item = self.inbox.get(block=idle)
            except queue.Empty:
                return
            idle = False
            if item is None:
                self._running = False
            elif item == "stats":
                self._responses.append(Response(0, stats=self._stats()))
            elif isinstance(item, int):
                self._cancelled.add(item)
            else:
                self._waiting.append(pickle.loads(item) if isinstance(item, bytes) else item)

    def _iterate(self) -> None:
        if not _behaviour.true("late_abort"):
            self._cancel()
        rows = self._schedule()
        late, self._late = self._late, []
        try:
            sampled = self._step(rows) if rows else []
        except Exception as exc:
            self._fail([active for active, _ in rows], f"{type(exc).__name__}: {exc}")
            sampled = []
        if self._overlap:
            sampled, self._unsettled = self._unsettled, sampled
        for active, token in sampled:
            if active in self._active:
                self._settle(active, token)
        for active in late:
            self._model.tree.release(active.lease, active.tokens[: active.computed])
        self._cancel()

    def _stats(self) -> dict[str, Any]:
        tree = self._model.tree
        blocks = {"maxNumBlocks": tree.total, "freeNumBlocks": tree.free, "storedNumBlocks": tree.stored}
        return {"kvCacheStats": blocks, "iterations": list(self.iterations), "numActiveRequests": len(self._active)}

    # --- admission ----------------------------------------------------------------------------------------------

    def _schedule(self) -> list[tuple[Active, int]]:
        """Requests of this iteration with their new tokens: everybody who decodes, then prompts as far as they fit."""
        ready = [active for active in self._active if not (active.in_flight and active.full)]
        if not _behaviour.true("surplus_step"):
            ready = [active for active in ready if not (active.in_flight and self._would_stop(active))]
        rows = [(active, active.unseen) for active in ready if not active.prefilling]
        budget = self._args.max_num_tokens - len(rows)
        for active in ready:
            if active.prefilling and (share := self._share(active.unseen, budget)):
                rows.append((active, share))
                budget -= share
        while self._waiting and len(rows) < self._args.max_batch_size:
            request = self._waiting[0]
            try:
                active = self._admit(request, budget)
            except Exception as exc:
                self._responses.append(Response(request.id, error=str(exc)))
                self._waiting.popleft()
                continue
            if active is None:
                break
            self._waiting.popleft()
            self._active.append(active)
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

    # --- one step -----------------------------------------------------------------------------------------------

    def _step(self, rows: list[tuple[Active, int]]) -> list[tuple[Active, int]]:
        """Forward pass, processors, sampling; the tokens of all whose prompt is complete."""
        batch = []
        for active, share in rows:
            new = (active.tokens + active.in_flight)[active.computed :][:share]
            batch.append(Row(active.handle, new, active.prefilling, active.internal_id))
        self.iterations.append((len(rows), sum(share for _, share in rows)))
        outputs = self._model.run(batch)
        logits = outputs.pop("logits")
        sampled = []
        for i, (active, share) in enumerate(rows):
            last = share == active.unseen
            active.computed += share
            active.iterations += 1
            if last or _behaviour.true("chunks_processed"):
                self._process(active, logits[i])
            if last:
                token = self._sample(active, logits[i])
                self._note(active, logits[i], token, {name: tensor[i] for name, tensor in outputs.items()})
                sampled.append((active, token))
        for active, token in sampled:
            active.in_flight.append(token)
        return sampled

    def _sample(self, active: Active, row: Tensor) -> int:
        request = active.request
        generated = active.generated + active.in_flight
        return self._sampler.sample(row, request.sampling_params, request.prompt_token_ids, generated)

    def _process(self, active: Active, row: Tensor) -> None:
        """Calls the request's processors; `row` [V] is edited in place."""
        if not active.generated and not _behaviour.true("first_token_processed"):
            return
        history = list(active.tokens)
        if not _behaviour.true("history_lags"):
            history += active.in_flight
        if not _behaviour.true("history_given"):
            history = history[len(active.request.prompt_token_ids) :]
        given = row if _behaviour.true("logits_in_place") else row.clone()
        view = given.view(1, 1, -1) if _behaviour.true("logits_shape") else given
        last = (None, None) if _behaviour.true("no_stream_no_client") else (0, active.request.id)
        for processor in active.processors:
            if _behaviour.true("five_arguments"):
                processor(active.internal_id, view, [history], *last)
            else:
                processor(active.internal_id, view, [history], last[0])

    def _note(self, active: Active, row: Tensor, token: int, additional: dict[str, Tensor]) -> None:
        """Keeps what the request wants to have reported."""
        params = active.request.sampling_params
        if params.logprobs:
            active.logprobs.append(_logprobs(row, token, params.logprobs))
        if params.return_generation_logits:
            active.logits.append(row.clone())
        for name in params.additional_model_outputs or ():
            if name not in additional:
                raise RuntimeError(f"the model returned no {name!r}; it returned {sorted(additional) or 'logits only'}")
            active.additional.setdefault(name, []).append(additional[name].clone())

    # --- results ------------------------------------------------------------------------------------------------

    def _settle(self, active: Active, token: int) -> None:
        """Appends a sampled token and says what follows from it."""
        active.in_flight.remove(token)
        active.tokens.append(token)
        self._model.tree.store(active.lease, active.tokens[: min(active.computed, len(active.tokens) - 1)])
        self._answer(active, self._finish_reason(active, token))

    def _finish_reason(self, active: Active, token: int) -> str | None:
        params = active.request.sampling_params
        ended = params.end_id is not None and not params.ignore_eos and token == params.end_id
        length = len(active.generated) >= params.max_tokens
        if ended and (_behaviour.true("end_id_first") or not length):
            return "END_ID"
        if length and _behaviour.true("length_before_stop_words"):
            return "LENGTH"
        if any(active.tokens[-len(word) :] == word for word in active.stop_words):
            return "STOP_WORDS"
        return "LENGTH" if length else None

    def _would_stop(self, active: Active) -> bool:
        return active.in_flight in active.stop_words or active.in_flight == [active.request.sampling_params.end_id]

    def _cancel(self) -> None:
        """Ends aborted requests."""
        for request in [request for request in self._waiting if request.id in self._cancelled]:
            self._waiting.remove(request)
            self._responses.append(Response(request.id, finish_reason="CANCELLED"))
        for active in [active for active in self._active if active.request.id in self._cancelled]:
            self._answer(active, "CANCELLED")
        self._cancelled.clear()

    def _answer(self, active: Active, reason: str | None) -> None:
        """Ends the request if there is a reason, and sends what is new."""
        request = active.request
        if reason is not None:
            self._end(active)
        interval = self._args.stream_interval
        due = request.streaming and (len(active.generated) == 1 or len(active.generated) % interval == 0)
        if not due and reason is None:
            return
        new = active.generated[active.sent :]
        active.sent += len(new)
        number = len(active.generated)
        self._responses.append(
            Response(
                request.id,
                new,
                reason,
                cached_tokens=active.lease.reported if _behaviour.true("reuse") else 0,
                decoding_iter=active.iterations,
                logprobs=active.logprobs[:number] if request.sampling_params.logprobs else None,
                generation_logits=torch.stack(active.logits[:number]) if active.logits else None,
                additional=self._additional(active, number),
            )
        )

    def _additional(self, active: Active, number: int) -> dict[str, Tensor] | None:
        if not active.additional or not number or not _behaviour.true("additional_outputs"):
            return None
        return {name: torch.stack(rows[:number]) for name, rows in active.additional.items()}

    def _end(self, active: Active) -> None:
        """Stores the blocks before the answer goes out, so whoever resubmits finds them."""
        self._active.remove(active)
        self._model.end(active.handle)
        if _behaviour.true("last_token_not_stored"):
            active.computed = min(active.computed, len(active.tokens) - 1)
        else:
            active.computed = len(active.tokens)
        if _behaviour.true("stored_before_answer"):
            self._model.tree.release(active.lease, active.tokens[: active.computed])
        else:
            self._late.append(active)

    def _fail(self, rows: list[Active], message: str) -> None:
        """An exception in a step ends all its requests."""
        if not _behaviour.true("one_failure_fails_all"):
            rows = rows[:1]
        for active in rows:
            self._active.remove(active)
            self._model.end(active.handle)
            self._model.tree.release(active.lease, [])
            self._responses.append(Response(active.request.id, error=message))
        self._unsettled = [(active, token) for active, token in self._unsettled if active in self._active]


def _logprobs(row: Tensor, token: int, count: int) -> dict[int, tuple[float, int]]:
    """The best `count` tokens and the sampled one: id -> (log-probability, rank)."""
    values = row.float().log_softmax(-1)
    ranks = {int(t): i + 1 for i, t in enumerate(values.topk(min(count, len(values))).indices)}
    if token not in ranks:
        ranks[token] = int((values > values[token]).sum()) + 1
    return {t: (float(values[t]), rank) for t, rank in ranks.items()}
