"""The executor's loop: in-flight batching, one forward pass over all scheduled requests per iteration."""

from __future__ import annotations

import pickle
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tensorrt_llm import _behaviour
from tensorrt_llm._double.active import Active
from tensorrt_llm._double.model import PagedModel, Row
from tensorrt_llm._double.scheduler import Scheduler
from tensorrt_llm.executor.result import Response

MOST_ITERATIONS = 1000


class ThreadWorker:
    """The loop in a thread of this process."""

    def __init__(self, args: Any, post: Callable[[list[Response]], None]) -> None:
        self.loop = Loop(PagedModel.load(args), args, post)
        self.loop.thread.start()

    def put(self, item: Any) -> None:
        """Sends an item to the loop; statistics are fetched beside it, which does not wake it."""
        if item == "stats":
            self.loop.tell_iterations()
        else:
            self.loop.inbox.put(item)

    def close(self) -> None:
        """Ends the loop."""
        self.loop.inbox.put(None)
        self.loop.thread.join()


class Loop:
    """Runs in its own thread; talk to it through `inbox`: requests, ids to abort, None for the end."""

    def __init__(self, model: PagedModel, args: Any, post: Callable[[list[Response]], None]) -> None:
        self.inbox: queue.Queue[Any] = queue.Queue()
        self._model = model
        self._args = args
        self._post = post
        self._scheduler = Scheduler(model, args)
        self._stats: deque[dict[str, Any]] = deque(maxlen=args.iter_stats_max_iterations or MOST_ITERATIONS)
        self._last: dict[str, int] | None = None
        self._iteration = 0
        self._counts = (0, 0)
        self._cancelled: set[int] = set()
        self._late: list[Active] = []
        self._responses: list[Response] = []
        self._running = True
        self.thread = threading.Thread(target=self._run, name="fake-tensorrt-llm", daemon=True)

    @torch.inference_mode()
    def _run(self) -> None:
        while self._running:
            began = time.monotonic()
            for item in self._arrivals():
                self._take(item)
                if not _behaviour.true("iteration_includes_wait"):
                    began = time.monotonic()
            active = len(self._scheduler.active)
            self._responses += self._scheduler.activate()
            self._counts = (len(self._scheduler.active), len(self._scheduler.active) - active)
            if self._running:
                self._guarded()
                self._note(time.monotonic() - began)
                self._iteration += 1
            responses, self._responses = self._responses, []
            if responses:
                self._post(responses)

    def _arrivals(self) -> Iterator[Any]:
        """What has come. The first message of an idle loop wakes it and gets an iteration of its own."""
        if not self._scheduler.active and not self._scheduler.waiting and self.inbox.empty():
            yield self.inbox.get()
            return
        while not self.inbox.empty():
            yield self.inbox.get()

    def _take(self, item: Any) -> None:
        if item is None:
            self._running = False
        elif isinstance(item, int):
            self._cancelled.add(item)
        else:
            self._scheduler.waiting.append(pickle.loads(item) if isinstance(item, bytes) else item)

    def _guarded(self) -> None:
        try:
            self._iterate()
        except Exception as exc:  # a fault of the double: everybody is told, nobody waits for ever
            self._fail_all(f"the double failed: {exc!r}")

    def _iterate(self) -> None:
        if not _behaviour.true("late_abort"):
            self._cancel()
            self._respond([])
        rows = self._scheduler.schedule()
        if not rows:
            if not _behaviour.true("idle_iterations_repeat"):
                self._last = None
            time.sleep(0.001)
            return
        late, self._late = self._late, []
        contexts = [active for active in rows if active.prefilling]
        charged = sum(active.chunk for active in contexts)
        resources = SimpleNamespace(resource_managers={"KV_CACHE_MANAGER": self._model.tree})
        try:
            self._step(rows, resources if _behaviour.true("manager_in_frames") else None)
        except Exception as exc:
            self._fail(rows, f"{type(exc).__name__}: {exc}")
            return
        generating = len(rows) - len(contexts)
        self._last = {"numContextRequests": len(contexts), "numGenRequests": generating, "numCtxTokens": charged}
        for active in late:
            assert active.lease is not None
            self._model.tree.release(active.lease, active.tokens[: active.computed])
        self._cancel()
        self._respond(rows)

    def _note(self, seconds: float) -> None:
        if not self._args.enable_iter_perf_stats or self._last is None or not _behaviour.true("iterations_told"):
            return
        tree = self._model.tree
        active, new = self._counts
        self._stats.append(
            {
                "iter": self._iteration,
                "iterLatencyMS": seconds * 1e3,
                "numActiveRequests": active,
                "numNewActiveRequests": new,
                "inflightBatchingStats": dict(self._last),
                "kvCacheStats": {"maxNumBlocks": tree.total, "freeNumBlocks": tree.available},
            }
        )

    def tell_iterations(self) -> None:
        """Answers with the statistics since the last time; called in another thread."""
        told = [self._stats.popleft() for _ in range(len(self._stats))]
        self._post([Response(0, stats=told)])

    def _step(self, rows: list[Active], resource_manager: Any) -> None:
        """Forward pass, processors, sampling. A processor finds `resource_manager` in the frames of its callers."""
        for active in rows:
            active.scheduled = active.scheduled or time.monotonic()
        logits = self._model.run(
            [Row(a.handle, a.tokens[a.computed : a.computed + a.chunk], a.prefilling, a.internal_id) for a in rows]
        )
        for active, row in zip(rows, logits, strict=True):
            active.computed += active.chunk
            last = active.computed == len(active.tokens)
            if last or _behaviour.true("chunks_processed"):
                active.process(row)
            if last:
                active.append(int(row.argmax()))
                active.first = active.first or (self._iteration, time.monotonic())
        for active in rows:
            stored = len(active.tokens) if not _behaviour.true("stored_at_the_end") else active.prompt_length
            self._model.tree.store(active.lease, active.tokens[: min(active.computed, stored - 1)])

    def _cancel(self) -> None:
        """Marks aborted requests; those that are not active yet are dropped."""
        dropped = [request for request in self._scheduler.waiting if request.id in self._cancelled]
        for request in dropped:
            self._scheduler.waiting.remove(request)
            if not _behaviour.true("queued_abort_unanswered"):
                self._responses.append(Response(request.id, finish_reason="CANCELLED"))
        for active in self._scheduler.active:
            if active.request.id in self._cancelled:
                active.reason = "CANCELLED"
        self._cancelled.clear()

    def _respond(self, rows: list[Active]) -> None:
        """Answers, and ends whoever has a reason."""
        interval = self._args.stream_interval
        for active in [active for active in self._scheduler.active if active.reason or active in rows]:
            number = len(active.generated)
            due = active.request.streaming and number > active.sent and (number == 1 or number % interval == 0)
            if active.reason is not None:
                self._end(active)
            if active.reason is not None or due:
                self._responses.append(active.response())

    def _end(self, active: Active) -> None:
        """Stores the blocks before the next fetch, so whoever resubmits finds them."""
        self._scheduler.active.remove(active)
        if active.lease is None:
            return
        self._model.end(active.handle)
        if not _behaviour.true("last_token_not_stored"):
            active.computed = len(active.tokens)
        if _behaviour.true("stored_before_answer"):
            self._model.tree.release(active.lease, active.tokens[: active.computed])
        else:
            self._late.append(active)

    def _fail(self, rows: list[Active], message: str) -> None:
        """An exception in a step ends all active requests, whether they took part or not."""
        if _behaviour.true("one_failure_fails_all"):
            rows = list(self._scheduler.active)
        for active in rows:
            self._scheduler.active.remove(active)
            if active.lease is not None:
                self._model.end(active.handle)
                self._model.tree.release(active.lease, [])
            self._responses.append(Response(active.request.id, error=message))

    def _fail_all(self, message: str) -> None:
        self._responses += [Response(request.id, error=message) for request in self._scheduler.waiting]
        self._responses += [Response(active.request.id, error=message) for active in self._scheduler.active]
        self._scheduler.waiting.clear()
        self._scheduler.active.clear()
