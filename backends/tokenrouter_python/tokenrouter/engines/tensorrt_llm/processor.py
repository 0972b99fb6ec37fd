"""The router inside TensorRT-LLM: a logits processor that leaves one token of a row, see `visits`.

One instance per visit. It is pickled into the engine's worker and called there for every row of its request, after the
forward pass and before the engine's own sampler (which ignores penalties, bad words and seeds, and picks what is left).
It never raises: that would fail every request of the engine.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from tokenrouter.engines.tensorrt_llm.visits import Task, WorkerVisit

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger(__name__)


class VisitProcessor:
    """See the module's text. Satisfies `tensorrt_llm.sampling_params.LogitsProcessor`.

    Args:
        task: a `Task`, packed.
        failed: id to leave where something fails; None leaves the row as it is.
    """

    def __init__(self, task: bytes, failed: int | None) -> None:
        self._task = task
        self._failed = failed
        self._visit: WorkerVisit | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Only what is told travels."""
        return VisitProcessor, (self._task, self._failed)

    def __call__(
        self,
        req_id: int,
        logits: Tensor,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None:
        """Leaves one token of `logits` [1, 1, V], in place; `token_ids` holds prompt and generated tokens."""
        row = logits.view(1, -1)
        try:
            self._visit = self._visit or WorkerVisit(msgspec.msgpack.decode(self._task, type=Task), token_ids[0])
            _leave(row, self._visit.choose(row, token_ids[0]))
        except Exception:
            log.exception("a visit failed in the engine's worker")
            with contextlib.suppress(Exception):
                if self._failed is not None:
                    _leave(row, torch.tensor([self._failed], device=row.device))


def _leave(row: Tensor, chosen: Tensor) -> None:
    row.fill_(float("-inf"))
    row.scatter_(1, chosen.view(1, 1), 0.0)
