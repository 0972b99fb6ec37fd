"""Who steps next when all models share one loop: the rules of the synchronous baselines.

A rule sees how many requests are at each model and which model ran last, and names the models that step now, all at
the same time; the next turn begins when all of them are done. So one rule serves the real driver (`inprocess`) and the
exact throughput without any overhead (`limits`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

Rule: TypeAlias = Callable[[Sequence[int], int], tuple[int, ...]]
"""Indices of the models that step now; all have requests, and there is at least one.

Arguments: requests at each model, not all 0; index of the model that ran last, the highest one if several did.
"""


def in_turn(counts: Sequence[int], last: int) -> tuple[int, ...]:
    """Lock-step as official code does it: the models step one after the other, each over all requests that are at it.

    For R2R this is its official loop: one step of the small model for the batch, then one step of the large model for
    the rows that diverged. Models without requests are passed over at no cost.
    """
    following = (*range(last + 1, len(counts)), *range(last + 1))
    return (next(model for model in following if counts[model]),)


def step_sync(counts: Sequence[int], last: int) -> tuple[int, ...]:
    """Lock-step with concurrent models: every model that has requests steps, then all wait for the slowest."""
    return tuple(model for model, count in enumerate(counts) if count)


def most_requests(counts: Sequence[int], last: int) -> tuple[int, ...]:
    """Model-sync: one model at a time, the one with most requests; between equals the larger model."""
    return (max(range(len(counts)), key=lambda model: (counts[model], model)),)


class Thresholds:
    """Model-sync at its best: one model at a time, a larger one only when enough requests wait for it.

    This is delayed batching without asynchronous execution: the largest model whose threshold is reached steps, else
    the smallest model that has requests. The thresholds are the best of all by the exact throughput, see
    `limits.best_thresholds`.

    Args:
        thresholds: least number of requests for a step, by model.
    """

    def __init__(self, thresholds: Sequence[int]) -> None:
        self.thresholds = tuple(thresholds)

    def __call__(self, counts: Sequence[int], last: int) -> tuple[int, ...]:
        for model in range(len(counts) - 1, 0, -1):
            if counts[model] >= self.thresholds[model]:
                return (model,)
        return (next(model for model, count in enumerate(counts) if count),)


RULES: Mapping[str, Rule] = {"lock-step": in_turn, "step-sync": step_sync, "model-sync": most_requests}
"""Rules without knobs, by the name that tables use."""
