"""Logits processors of the contract tests. They travel by reference, so they stand in an importable module."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from tests.contract.double import use_double

use_double()

from tensorrt_llm.sampling_params import LogitsProcessor  # noqa: E402
from torch import Tensor  # noqa: E402

CALLS: dict[str, list[Any]] = {}
"""What processors saw, by tag; shared only because the tests' loop runs in this process."""

GATES: dict[str, threading.Semaphore] = {}


class Record(LogitsProcessor):
    """Notes the arguments of each call, the logits as they were, and a number of its own that counts up."""

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.count = 0
        CALLS[tag] = []

    def __call__(self, req_id: int, logits: Tensor, token_ids: list[list[int]], *more: Any) -> None:
        self.count += 1
        CALLS.setdefault(self.tag, []).append((self.count, req_id, logits.clone(), token_ids, *more))


class Force(LogitsProcessor):
    """Leaves one id per step, None for no change; the last entry goes on."""

    def __init__(self, *ids: int | None) -> None:
        self.ids = ids
        self.count = 0

    def __call__(self, req_id: int, logits: Tensor, token_ids: list[list[int]], *more: Any) -> None:
        token = self.ids[min(self.count, len(self.ids) - 1)]
        self.count += 1
        if token is not None:
            logits[...] = float("-inf")
            logits[..., token] = 0.0


class Gate(LogitsProcessor):
    """Lets one step pass per release of its semaphore; notes when a step arrives."""

    def __init__(self, tag: str, seconds: float = 10) -> None:
        self.tag = tag
        self.seconds = seconds
        GATES[tag] = threading.Semaphore(0)
        CALLS[tag] = []

    def __call__(self, req_id: int, logits: Tensor, token_ids: list[list[int]], *more: Any) -> None:
        CALLS[self.tag].append(token_ids)
        if not GATES[self.tag].acquire(timeout=self.seconds):
            raise TimeoutError("the gate stayed shut")


class Fail(LogitsProcessor):
    """Raises."""

    def __call__(self, req_id: int, logits: Tensor, token_ids: list[list[int]], *more: Any) -> None:
        raise ValueError("no luck")


def three(req_id: int, logits: Tensor, token_ids: Sequence[int]) -> None:
    """A callable with too few."""
