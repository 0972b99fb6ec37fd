"""The executor's loop: in-flight batching, one forward pass over all active requests per iteration."""

from __future__ import annotations

import pickle
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tensorrt_llm import _behaviour
from tensorrt_llm._double.active import Active
from tensorrt_llm._double.model import PagedModel, Row
from tensorrt_llm._double.requests import Response
from tensorrt_llm._double.sampler import TorchSampler
from tensorrt_llm._double.scheduler import Scheduler


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
        self._scheduler = Scheduler(model, args)
        self._unsettled: list[tuple[Active, int]] = []
        self._cancelled: set[int] = set()
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
            known = [*(active.request for active in self._scheduler.active), *self._scheduler.waiting]
            self._responses += [Response(request.id, error=f"the double failed: {exc!r}") for request in known]
            self._scheduler.active, self._unsettled = [], []
            self._scheduler.waiting.clear()

    def _fetch(self) -> None:
        """Takes what has come; sleeps only when there is nothing to do. The first message of an idle loop wakes it."""
        idle = not self._scheduler.active and not self._scheduler.waiting and not self._unsettled
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
                self._scheduler.waiting.append(pickle.loads(item) if isinstance(item, bytes) else item)

    def _iterate(self) -> None:
        if not _behaviour.true("late_abort"):
            self._cancel()
        rows = self._scheduler.schedule()
        self._responses += self._scheduler.refused
        self._scheduler.refused = []
        late, self._late = self._late, []
        try:
            sampled = self._step(rows) if rows else []
        except Exception as exc:
            self._fail([active for active, _ in rows], f"{type(exc).__name__}: {exc}")
            sampled = []
        if self._overlap:
            sampled, self._unsettled = self._unsettled, sampled
        for active, token in sampled:
            if active in self._scheduler.active:
                self._settle(active, token)
        for active in late:
            self._model.tree.release(active.lease, active.tokens[: active.computed])
        self._cancel()

    def _stats(self) -> dict[str, Any]:
        tree = self._model.tree
        blocks = {"maxNumBlocks": tree.total, "freeNumBlocks": tree.free, "storedNumBlocks": tree.stored}
        return {
            "kvCacheStats": blocks,
            "iterations": list(self.iterations),
            "numActiveRequests": len(self._scheduler.active),
        }

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
                active.process(logits[i])
            if last:
                token = self._sample(active, logits[i])
                active.note(logits[i], token, {name: tensor[i] for name, tensor in outputs.items()})
                sampled.append((active, token))
        for active, token in sampled:
            active.in_flight.append(token)
        return sampled

    def _sample(self, active: Active, row: Tensor) -> int:
        request = active.request
        generated = active.generated + active.in_flight
        return self._sampler.sample(row, request.sampling_params, request.prompt_token_ids, generated)

    def _settle(self, active: Active, token: int) -> None:
        """Appends a sampled token and says what follows from it."""
        active.in_flight.remove(token)
        active.tokens.append(token)
        self._model.tree.store(active.lease, active.tokens[: min(active.computed, len(active.tokens) - 1)])
        self._answer(active, active.finish_reason(token))

    def _cancel(self) -> None:
        """Ends aborted requests."""
        for request in [request for request in self._scheduler.waiting if request.id in self._cancelled]:
            self._scheduler.waiting.remove(request)
            self._responses.append(Response(request.id, finish_reason="CANCELLED"))
        for active in [active for active in self._scheduler.active if active.request.id in self._cancelled]:
            self._answer(active, "CANCELLED")
        self._cancelled.clear()

    def _answer(self, active: Active, reason: str | None) -> None:
        """Ends the request if there is a reason, and sends what is new."""
        if reason is not None:
            self._end(active)
        interval = self._args.stream_interval
        due = active.request.streaming and (len(active.generated) == 1 or len(active.generated) % interval == 0)
        if not due and reason is None:
            return
        self._responses.append(active.response(reason))

    def _end(self, active: Active) -> None:
        """Stores the blocks before the answer goes out, so whoever resubmits finds them."""
        self._scheduler.active.remove(active)
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
            self._scheduler.active.remove(active)
            self._model.end(active.handle)
            self._model.tree.release(active.lease, [])
            self._responses.append(Response(active.request.id, error=message))
        self._unsettled = [(active, token) for active, token in self._unsettled if active in self._scheduler.active]
