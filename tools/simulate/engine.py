"""A clock that is set, and an engine whose steps take the time that a profile says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch

from tokenrouter.engines.base import EngineInfo, EngineRow, PolicyExtras, StepResult, nothing
from tokenrouter.rng import draw
from tools.dtmc.profile import ModelProfile

UNLIMITED = 1 << 60
"""Of tokens, and of KV unless the profile gives a limit."""

VOCAB_SIZE = 2
_AGREEMENT = 1
"""Stream of the draws of agreement; sequences count instead of seeds."""


class VirtualClock:
    """Time of one model, in ns. Its subserver reads it, its engine advances it, the event loop sets it."""

    def __init__(self) -> None:
        self.now_ns = 0

    def __call__(self) -> int:
        return self.now_ns


class VirtualSequence:
    """A sequence of which only the length is known."""

    __slots__ = ("length", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.length = 0


class VirtualEngine:
    """Satisfies `engines.base.Engine`: every token is 0, and a step moves the clock on by its time.

    Args:
        kv_tokens: that the orchestrator may reserve.
        agreement: share of positions at which the token is 0, in [0, 1]; elsewhere it is 1.

    Attributes:
        clock: that its steps move on.
    """

    blocks_leased = blocks_used = 0

    def __init__(
        self,
        model: ModelProfile,
        clock: VirtualClock,
        *,
        max_batch: int,
        kv_tokens: int = UNLIMITED,
        agreement: float = 1.0,
    ) -> None:
        self.clock = clock
        self._agreement = agreement
        self._opened = 0
        self._logits = torch.tensor([[1.0, 0.0]])
        self._step_time_ms = lru_cache(maxsize=65536)(model.step_time_ms)
        self.info = EngineInfo(
            name="virtual",
            vocab_size=VOCAB_SIZE,
            hidden_size=0,
            max_context=UNLIMITED,
            block_tokens=1,
            kv_blocks=kv_tokens,
            max_batch=max_batch,
            max_num_tokens=UNLIMITED,
            emulated=True,
        )

    def extras(self, model: str) -> PolicyExtras:
        return {}

    def open(self, *, kv_tokens: int, prompt_tokens: int) -> VirtualSequence:
        """Sequences are numbered."""
        self._opened += 1
        return VirtualSequence(self._opened)

    def step(self, rows: Sequence[EngineRow], meanwhile: Callable[[], None] = nothing) -> StepResult:
        """Takes the profile's time; extended tokens are the new ones beyond one per request."""
        meanwhile()
        extended = sum(len(row.tokens) for row in rows) - len(rows)
        self.clock.now_ns += nanoseconds(self._step_time_ms(len(rows), extended))
        if self._agreement == 1.0:
            emit = sum(row.emit for row in rows)
            if emit > len(self._logits):
                self._logits = torch.tensor([[1.0, 0.0]]).expand(2 * emit, VOCAB_SIZE).contiguous()
            return StepResult(self._logits[:emit], None)
        return StepResult(torch.tensor([place for row in rows for place in self._drawn(row)]), None)

    def _drawn(self, row: EngineRow) -> list[list[float]]:
        """Logits of a row's emitting positions; a position of a sequence always has the same."""
        handle: VirtualSequence = row.handle
        handle.length += len(row.tokens)
        places = range(handle.length - row.emit, handle.length)
        return [
            [1.0, 0.0] if draw(handle.number, place, _AGREEMENT) < self._agreement else [0.0, 1.0] for place in places
        ]

    def truncate(self, handle: VirtualSequence, length: int) -> None:
        """Forgets positions."""
        handle.length = min(handle.length, length)

    def close(self, handle: VirtualSequence) -> None:
        """Nothing to give back."""

    def shutdown(self) -> None:
        """Nothing to free."""


def nanoseconds(milliseconds: float) -> int:
    """The nearest whole number of ns, at least 1 if there is any time at all."""
    return max(1, round(milliseconds * 1e6)) if milliseconds > 0 else 0
