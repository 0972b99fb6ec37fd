"""TensorRT-LLM's LLM API as an engine: one `generate_async` per visit, see docs/tensorrt_llm.md.

The library lives in a thread of its own with an asyncio loop. Visits go in through that loop; what their outputs say
comes back as news in a queue, and whoever listens is woken.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tokenrouter.engines.base import EngineStep, LoopEngine, Placement, PolicyExtras, VisitNews
from tokenrouter.engines.tensorrt_llm.background import BackgroundEngine
from tokenrouter.engines.tensorrt_llm.config import TensorRtLlmConfig
from tokenrouter.engines.tensorrt_llm.environment import clean_environment
from tokenrouter.engines.tensorrt_llm.graph_router import admit, input_embedding, router_of
from tokenrouter.engines.tensorrt_llm.iterations import Iterations, records
from tokenrouter.engines.tensorrt_llm.library import Library
from tokenrouter.engines.tensorrt_llm.outputs import Visit
from tokenrouter.engines.tensorrt_llm.probe import pool_blocks
from tokenrouter.engines.tensorrt_llm.processor import VisitProcessor
from tokenrouter.engines.tensorrt_llm.routed_model import registered
from tokenrouter.engines.tensorrt_llm.visits import ControlIds, Task
from tokenrouter.engines.tensorrt_llm.workers import Workers, worker_pids
from tokenrouter.errors import ConfigError, EngineFailed, InvalidRequest
from tokenrouter.messages import Outcome

if TYPE_CHECKING:
    from tokenrouter.subserver.sequence import ModelSequence

log = logging.getLogger(__name__)

ABORT_GRACE_S = 10.0
"""A request that was aborted while it queued is never answered: whoever follows it gives up after so long."""

STEPS_S = 0.5
"""How often the engine is asked for the times of its steps, while visits run."""


class TensorRtLlmEngine(BackgroundEngine):
    """See the module's text.

    Args:
        checkpoint: the model's folder.
        config: settings.
        placement: whose model this is.

    Raises:
        ConfigError: a setting cannot work, or the deployment's policy cannot run here.
    """

    def __init__(self, checkpoint: Path, config: TensorRtLlmConfig, placement: Placement) -> None:
        # First of all, see `environment`.
        clean_environment(config.own.gpus)
        self._checkpoint, self._own = checkpoint, config.own
        self._handoff_ids = config.own.handoff_ids or ()
        self._visits: dict[int, Visit] = {}
        self._iterations = Iterations()
        self._begun = 0
        self._asking: asyncio.Task[None] | None = None
        self._dead = ""
        self._library: Library | None = None
        self._workers: Workers | None = None
        self._first: asyncio.Task[int | None] | None = None
        super().__init__(config.info)
        try:
            extras = self.extras(placement.model)
            self._router = router_of(placement, config.info, extras, checkpoint, self._handoff_ids)
            others = worker_pids()
            self._library = self.beside(lambda: self._load(config))
            self._trust(config, self.wait_for(self._begin(self._library, worker_pids() - others)))
            if config.arguments.get("enable_iter_perf_stats"):
                self.call(self._watch_steps, self._library)
        except BaseException:
            self.shutdown()
            raise

    def _load(self, config: TensorRtLlmConfig) -> Library:
        with registered(self._checkpoint, None if self._router is None else self._router.settings):
            return Library(config)

    async def _begin(self, library: Library, pids: set[int]) -> int | None:
        """Watches the workers, then the first request; how many blocks there are."""
        self._workers = Workers(pids, self._loop, self._lost)
        self._first = self._loop.create_task(pool_blocks(library))
        try:
            return await self._first
        except asyncio.CancelledError:
            raise ConfigError(self._dead) from None

    def _trust(self, config: TensorRtLlmConfig, found: int | None) -> None:
        """Lets the ledger have the blocks that there are."""
        asked = blocks = config.info.kv_blocks
        if found is None:
            log.warning("TensorRT-LLM's KV blocks cannot be counted; trusting kv_cache_config.max_tokens (%d)", asked)
        else:
            blocks = found
        if blocks < asked:
            log.warning(
                "TensorRT-LLM allocated %d KV blocks, not the %d of kv_cache_config.max_tokens: the memory did not "
                "allow more (free_gpu_memory_fraction, and what else is on the GPU)",
                blocks,
                asked,
            )
        graphs = config.arguments.get("cuda_graph_config") or {}
        # Padded CUDA graphs keep one block for the request that pads.
        self.resize(blocks - bool(graphs.get("enable_padding")))

    def extras(self, model: str) -> PolicyExtras:
        """The input embedding [V, H], read from the checkpoint, on the CPU."""
        return {"input_embedding": partial(input_embedding, model, self._checkpoint)}

    def admit(self, sequence: ModelSequence) -> None:
        """See `LoopEngine.admit`: refuses log-probabilities, and policies that cannot run in the engine's worker."""
        if sequence.sampling.log_probs:
            raise InvalidRequest(
                f"return_log_probs: {sequence.model!r} runs on TensorRT-LLM, which reports log-probabilities after the "
                "router has left one token; leave it out"
            )
        self._ids(sequence)
        admit(sequence, self._router, argmax=self._own.router_token == "argmax")

    def _ids(self, sequence: ModelSequence) -> ControlIds:
        return ControlIds.of(sequence.policy, sequence.model, self._handoff_ids)

    def submit(self, visits: Sequence[tuple[int, ModelSequence]]) -> None:
        """See `LoopEngine.submit`."""
        mark = None if self._router is None else self._router.settings.mark
        started = []
        for ticket, sequence in visits:
            task = Task.of(sequence, checkpoint=self._checkpoint, ids=self._ids(sequence), mark=mark)
            sequence.handle.tokens = len(sequence.tokens)
            most = task.most_tokens(sequence.position)
            started.append(Visit(ticket, sequence.handle, task, list(sequence.tokens), most))
            self._visits[ticket] = started[-1]
        self.call(self._start, started)

    def cancel(self, ticket: int) -> None:
        """Aborts; the engine acts on it in its next step."""
        visit = self._visits.pop(ticket, None)
        if visit is not None:
            # Behind its start in the loop, so by then there is an output unless that failed.
            self.call(self._abort, visit)

    def shutdown(self) -> None:
        """Ends the library and its processes. Repeating it is harmless."""
        if self.alive:
            if self._workers is not None:
                self.call(self._workers.close)
            if self._asking is not None:
                self.call(self._asking.cancel)
            if self._library is not None and not self._dead:  # it would wait for the process that is gone
                self.beside(self._library.shutdown)
            self.end()

    # --- in the library's loop ----------------------------------------------------------------------------------

    def _start(self, visits: Sequence[Visit]) -> None:
        """All submissions of a batch back to back."""
        for visit in visits:
            try:
                visit.output = self._submitted(visit)
            except Exception as exc:
                self._failed(visit, exc)
                continue
            self._begun += 1
            visit.follower = self.spawn(self._follow(visit))

    def _submitted(self, visit: Visit) -> Any:
        if self._dead or self._library is None:
            raise EngineFailed(self._dead)
        end_ids = visit.task.sampling.end_ids
        failed = visit.task.ids.failed if visit.task.ids.failed is not None else next(iter(end_ids), None)
        return self._library.generate(
            visit.tokens,
            max_tokens=visit.max_tokens,
            end_id=visit.end_id,
            stop_ids=visit.stop_ids,
            processor=VisitProcessor(msgspec.msgpack.encode(visit.task), failed),
        )

    async def _follow(self, visit: Visit) -> None:
        try:
            async for _ in visit.output:
                news = visit.news()
                if news is None:
                    continue
                visit.lease.tokens += len(news.tokens)
                self.tell(news)
                if news.outcome == Outcome.FAILED and not visit.output.finished:
                    visit.output.abort()
            self._visits.pop(visit.ticket, None)
            self._tell_step(self._iterations.timed(visit.output.outputs[0]))
        except Exception as exc:
            self._failed(visit, exc)

    def _watch_steps(self, library: Library) -> None:
        # Not spawned: it follows no visit, and lasts as long as the loop.
        self._asking = self._loop.create_task(self._ask_for_steps(library))

    async def _ask_for_steps(self, library: Library) -> None:
        """Asks for times of steps, only if visits ran since: an idle engine has none, and some releases wait for it."""
        asked_for = -1
        try:
            while not self._dead:
                await asyncio.sleep(STEPS_S)
                if not self._visits and asked_for == self._begun:
                    continue
                asked_for = -1 if self._visits else self._begun
                async for record in records(library.llm):
                    self._tell_step(self._iterations.told(record))
        except Exception as exc:
            log.warning("times of TensorRT-LLM's steps are not known from here on: %s: %s", type(exc).__name__, exc)

    def _tell_step(self, step: EngineStep | None) -> None:
        if step is not None:
            self.tell_step(step)

    def _abort(self, visit: Visit) -> None:
        if visit.follower is None or visit.follower.done() or self._dead:
            return
        visit.output.abort()
        giving_up = self._loop.call_later(ABORT_GRACE_S, visit.follower.cancel)
        visit.follower.add_done_callback(lambda _: giving_up.cancel())

    def _lost(self, pid: int) -> None:
        """A worker process ended: nothing that is in flight will be answered."""
        self._dead = f"worker process {pid} of TensorRT-LLM ended; load the model again"
        log.error(self._dead)
        if self._first is not None:
            self._first.cancel()
        for visit in list(self._visits.values()):
            if visit.follower is not None:
                visit.follower.cancel()
            self._failed(visit, EngineFailed(self._dead))

    def _failed(self, visit: Visit, exc: Exception) -> None:
        self._visits.pop(visit.ticket, None)
        error = exc if isinstance(exc, EngineFailed) else EngineFailed(f"TensorRT-LLM: {type(exc).__name__}: {exc}")
        self.tell(VisitNews(visit.ticket, Outcome.FAILED, error=error))


if TYPE_CHECKING:
    _: type[LoopEngine] = TensorRtLlmEngine
