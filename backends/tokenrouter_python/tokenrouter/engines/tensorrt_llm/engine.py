"""TensorRT-LLM's LLM API as an engine: one `generate_async` per visit, see docs/tensorrt_llm.md.

The library lives in a thread of its own with an asyncio loop. Visits go in through that loop; what their outputs say
comes back as news in a queue, and whoever listens is woken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from tokenrouter.engines.base import LoopEngine, Placement, PolicyExtras, VisitNews
from tokenrouter.engines.tensorrt_llm.background import BackgroundEngine
from tokenrouter.engines.tensorrt_llm.config import TensorRtLlmConfig
from tokenrouter.engines.tensorrt_llm.graph_router import admit, input_embedding, router_of
from tokenrouter.engines.tensorrt_llm.ledger import Lease
from tokenrouter.engines.tensorrt_llm.library import Library
from tokenrouter.engines.tensorrt_llm.processor import VisitProcessor
from tokenrouter.engines.tensorrt_llm.routed_model import registered
from tokenrouter.engines.tensorrt_llm.visits import Task, reserved_ids
from tokenrouter.errors import EngineFailed, InvalidRequest, PolicyFailed
from tokenrouter.messages import Outcome

if TYPE_CHECKING:
    from tokenrouter.subserver.sequence import ModelSequence


@dataclass(slots=True)
class _Visit:
    """One `generate_async`: what goes in, and how far its output has been read."""

    ticket: int
    lease: Lease
    task: Task
    tokens: list[int]
    max_tokens: int
    output: Any = None
    seen: int = 0

    def news(self) -> VisitNews | None:
        """What the output says beyond what was read before."""
        completion, reserved = self.output.outputs[0], self.task.handoff_ids
        tokens = list(completion.token_ids[self.seen :])
        self.seen += len(tokens)
        reason, ended_by = completion.finish_reason, completion.stop_reason
        if tokens and tokens[-1] in reserved:
            # The length is tested before stop ids, so a reserved id that came last is left in place.
            reason, ended_by = "stop", tokens.pop()
        if reason is None:
            return self._told(Outcome.STAY, tokens) if tokens else None
        if reason == "length":
            return self._told(Outcome.LENGTH, tokens)
        if reason != "stop":
            return self._told(Outcome.FAILED, error=EngineFailed(f"TensorRT-LLM ended the visit: {reason}"))
        if ended_by not in reserved:
            return self._told(Outcome.STOP, tokens if ended_by is None else [*tokens, ended_by])
        target = self.task.models[reserved.index(ended_by)]
        if target != self.task.model:
            return self._told(Outcome.LEAVE, tokens, target)
        error = PolicyFailed(f"policy {self.task.policy.name!r} failed in the engine's worker; its log says why")
        return self._told(Outcome.FAILED, error=error)

    def _told(
        self, outcome: Outcome, tokens: Sequence[int] = (), target: str = "", error: Exception | None = None
    ) -> VisitNews:
        return VisitNews(
            self.ticket, outcome, tuple(tokens), target, getattr(self.output, "cached_tokens", None), error
        )


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
        self._checkpoint, self._own = checkpoint, config.own
        self._handoff_ids = config.own.handoff_ids or ()
        self._visits: dict[int, _Visit] = {}
        super().__init__(config.info)
        try:
            extras = self.extras(placement.model)
            self._router = router_of(placement, config.info, extras, checkpoint, self._handoff_ids)
            with registered(checkpoint, None if self._router is None else self._router.settings):
                self._library = self.beside(lambda: Library(config))
        except BaseException:
            self.end()
            raise

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
        reserved_ids(sequence.policy, sequence.model, self._handoff_ids)
        admit(sequence, self._router, argmax=self._own.router_token == "argmax")

    def submit(self, visits: Sequence[tuple[int, ModelSequence]]) -> None:
        """See `LoopEngine.submit`."""
        mark = None if self._router is None else self._router.settings.mark
        started = []
        for ticket, sequence in visits:
            reserved = reserved_ids(sequence.policy, sequence.model, self._handoff_ids)
            task = Task.of(sequence, checkpoint=self._checkpoint, reserved=reserved, mark=mark)
            sequence.handle.tokens = len(sequence.tokens)
            most = task.most_tokens(sequence.position)
            started.append(_Visit(ticket, sequence.handle, task, list(sequence.tokens), most))
            self._visits[ticket] = started[-1]
        self.call(self._start, started)

    def cancel(self, ticket: int) -> None:
        """Aborts; the engine acts on it in its next step."""
        visit = self._visits.pop(ticket, None)
        if visit is not None:
            # Behind its start in the loop, so by then there is an output unless that failed.
            self.call(lambda: visit.output and visit.output.abort())

    def shutdown(self) -> None:
        """Ends the library and its processes. Repeating it is harmless."""
        if self.alive:
            self.beside(self._library.shutdown)
            self.end()

    # --- in the library's loop ----------------------------------------------------------------------------------

    def _start(self, visits: Sequence[_Visit]) -> None:
        """All submissions of a batch back to back."""
        for visit in visits:
            end_ids = visit.task.sampling.end_ids
            try:
                visit.output = self._library.generate(
                    visit.tokens,
                    max_tokens=visit.max_tokens,
                    end_ids=end_ids,
                    stop_ids=[*visit.task.handoff_ids, *end_ids[1:]],
                    processor=VisitProcessor(msgspec.msgpack.encode(visit.task)),
                )
            except Exception as exc:
                self._failed(visit, exc)
                continue
            self.spawn(self._follow(visit))

    async def _follow(self, visit: _Visit) -> None:
        try:
            async for _ in visit.output:
                if (news := visit.news()) is not None:
                    visit.lease.tokens += len(news.tokens)
                    self.tell(news)
            self._visits.pop(visit.ticket, None)
        except Exception as exc:
            self._failed(visit, exc)

    def _failed(self, visit: _Visit, exc: Exception) -> None:
        self._visits.pop(visit.ticket, None)
        error = EngineFailed(f"TensorRT-LLM: {type(exc).__name__}: {exc}")
        self.tell(VisitNews(visit.ticket, Outcome.FAILED, error=error))


if TYPE_CHECKING:
    _: type[LoopEngine] = TensorRtLlmEngine
