"""A visit as its output tells of it: what the ids at its end mean."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenrouter.engines.base import VisitNews
from tokenrouter.engines.tensorrt_llm.ledger import Lease
from tokenrouter.engines.tensorrt_llm.visits import Task
from tokenrouter.errors import EngineFailed, PolicyFailed
from tokenrouter.messages import Outcome


@dataclass(slots=True, eq=False)
class Visit:
    """One `generate_async`: what goes in, and how far its output has been read.

    What ends a visit is told when it comes, although the engine may need one more step to end the request: an end id,
    or an id that means a model, is followed by the id that the engine stops at.

    Attributes:
        max_tokens: that it may write.
        output: the library's, once submitted.
        follower: reads the output.
        seen: tokens of the output that were read.
        over: its end was told.
    """

    ticket: int
    lease: Lease
    task: Task
    tokens: list[int]
    max_tokens: int
    output: Any = None
    follower: asyncio.Task[None] | None = None
    seen: int = 0
    over: bool = False

    @property
    def stop_ids(self) -> Sequence[int]:
        """Ids that end it beside the one that the engine stops at: only where no id is reserved to follow them."""
        return self.task.sampling.end_ids[1:] if self.task.ids.end is None else ()

    @property
    def end_id(self) -> int | None:
        """The id at which the engine ends the request."""
        ids, end_ids = self.task.ids, self.task.sampling.end_ids
        return ids.end if ids.end is not None else next(iter(end_ids), None)

    def news(self) -> VisitNews | None:
        """What the output says beyond what was read before."""
        if self.over:
            return None
        completion = self.output.outputs[0]
        tokens = list(completion.token_ids[self.seen :])
        self.seen += len(tokens)
        for i, token in enumerate(tokens):
            if (told := self._ending(token, tokens[:i])) is not None:
                return told
        reason = completion.finish_reason
        if reason is None:
            return self._told(Outcome.STAY, tokens) if tokens else None
        if reason == "length":
            return self._told(Outcome.LENGTH, tokens)
        if reason == "stop":  # one of the stop ids, which is cut off
            return self._told(Outcome.STOP, [*tokens, completion.stop_reason])
        return self._failed(EngineFailed(f"TensorRT-LLM ended the visit: {reason}"))

    def _ending(self, token: int, before: list[int]) -> VisitNews | None:
        """What an id says that is not just a token of the response."""
        task = self.task
        if token in task.sampling.end_ids:
            return self._told(Outcome.STOP, [*before, token])
        if token in task.ids.targets:
            target = task.models[task.ids.targets.index(token)]
            if target != task.model:
                return self._told(Outcome.LEAVE, before, target)
            return self._failed(PolicyFailed(f"policy {task.policy.name!r} failed in the engine's worker; see its log"))
        if token == task.ids.end:
            return self._failed(EngineFailed("the visit failed in TensorRT-LLM's worker; its log says why"))
        return None

    def _failed(self, error: Exception) -> VisitNews:
        return self._told(Outcome.FAILED, error=error)

    def _told(
        self, outcome: Outcome, tokens: Sequence[int] = (), target: str = "", error: Exception | None = None
    ) -> VisitNews:
        self.over = outcome != Outcome.STAY
        cached_tokens = getattr(self.output, "cached_tokens", None)
        return VisitNews(self.ticket, outcome, tuple(tokens), target, cached_tokens, error)
