"""A clock that is set, and an engine whose steps take the time that a profile says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from tokenrouter.engines.base import EngineInfo, EngineRow, PolicyExtras, StepResult
from tools.dtmc.profile import ModelProfile

UNLIMITED = 1 << 60
"""KV blocks and tokens: the simulator studies time, not memory."""

VOCAB_SIZE = 2


class VirtualClock:
    """Time of one model, in ns. Its subserver reads it, its engine advances it, the event loop sets it."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class VirtualEngine:
    """Satisfies `engines.base.Engine`: every token is 0, and a step moves the clock on by its time."""

    blocks_leased = blocks_used = 0

    def __init__(self, model: ModelProfile, clock: VirtualClock, *, max_batch: int) -> None:
        self._clock = clock
        self._logits = torch.tensor([[1.0, 0.0]]).expand(max_batch, VOCAB_SIZE).contiguous()
        self._step_time_ms = lru_cache(maxsize=65536)(model.step_time_ms)
        self.info = EngineInfo(
            name="virtual",
            vocab_size=VOCAB_SIZE,
            hidden_size=0,
            max_context=UNLIMITED,
            block_tokens=1,
            kv_blocks=UNLIMITED,
            max_batch=max_batch,
            max_num_tokens=UNLIMITED,
            emulated=True,
        )

    def extras(self, model: str) -> PolicyExtras:
        return {}

    def open(self, *, kv_tokens: int, prompt_tokens: int) -> None:
        """Nothing is kept per sequence."""

    def step(self, rows: Sequence[EngineRow]) -> StepResult:
        """Takes the profile's time; extended tokens are the new ones beyond one per request."""
        extended = sum(len(row.tokens) for row in rows) - len(rows)
        self._clock.now_ns += nanoseconds(self._step_time_ms(len(rows), extended))
        return StepResult(self._logits[: sum(row.emit for row in rows)], None)

    def truncate(self, handle: None, length: int) -> None:
        """Nothing to forget."""

    def close(self, handle: None) -> None:
        """Nothing to give back."""

    def shutdown(self) -> None:
        """Nothing to free."""


def nanoseconds(milliseconds: float) -> int:
    """The nearest whole number of ns, at least 1 if there is any time at all."""
    return max(1, round(milliseconds * 1e6)) if milliseconds > 0 else 0
