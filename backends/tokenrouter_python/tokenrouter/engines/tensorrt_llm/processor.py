"""The router inside TensorRT-LLM: a logits processor that leaves one token of a row, see `engines.visits`.

One instance per visit. It is pickled into the engine's worker and called there for every row of its request, after the
forward pass and before the engine's own sampler (which ignores penalties, bad words and seeds, and picks what is left).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tokenrouter.engines.tensorrt_llm.visits import Task, WorkerVisit

if TYPE_CHECKING:
    from torch import Tensor


class VisitProcessor:
    """See the module's text. Satisfies `tensorrt_llm.sampling_params.LogitsProcessor`."""

    def __init__(self, task: bytes) -> None:
        self._task = task
        self._visit: WorkerVisit | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Only the task travels."""
        return VisitProcessor, (self._task,)

    def __call__(
        self,
        req_id: int,
        logits: Tensor,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None:
        """Leaves one token of `logits` [1, 1, V], in place; `token_ids` holds prompt and generated tokens."""
        self._visit = self._visit or WorkerVisit(msgspec.msgpack.decode(self._task, type=Task), token_ids[0])
        row = logits.view(1, -1)
        chosen = self._visit.choose(row, token_ids[0])
        row.fill_(float("-inf"))
        row.scatter_(1, chosen.view(1, 1), 0.0)
