"""Thresholds: by recall on labelled rows, or by the share of tokens that the large model writes in routed runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tokenrouter.offline import TokenRouter

# R2R's grid: 100 points.
GRID = np.linspace(0.01, 0.99, 100)
# Logits beyond which a probability cannot be told from 0 or 1 in float32.
_LOGIT_LIMIT = 14.0


def by_recall(probabilities: Tensor, labels: Tensor, recall: float = 0.95) -> tuple[float, float, float]:
    """R2R's rule: among the grid's points with enough recall the one that sends fewest rows to the large model.

    If no point has enough recall, the one with the highest. Source: thu-nics/R2R, script/train.

    Args:
        probabilities: [V] that the large model is needed.
        labels: [V], 1 where it is.
        recall: share of these that must be found.

    Returns:
        Threshold, its recall, and the share of rows at or above it.
    """
    found = [(float(t), *_rates(probabilities, labels, float(t))) for t in GRID]
    enough = [point for point in found if point[1] >= recall]
    if enough:
        return min(enough, key=lambda point: (point[2], -point[0]))
    return max(found, key=lambda point: (point[1], point[0]))


def _rates(probabilities: Tensor, labels: Tensor, threshold: float) -> tuple[float, float]:
    chosen = probabilities >= threshold
    positives = labels == 1
    return float((chosen & positives).sum() / positives.sum().clamp(min=1)), float(chosen.float().mean())


def by_share(
    measure: Callable[[float], float], share: float, *, rising: bool, steps: int = 9, tolerance: float = 0.005
) -> tuple[float, float]:
    """Searches the threshold in (0, 1) at which the large model writes a share of the tokens; bisection on its logit.

    Args:
        measure: threshold -> share of the large model. Monotone up to noise.
        rising: whether a higher threshold gives the large model more (CITER) or less.

    Returns:
        The threshold that came nearest, and its share.
    """
    low, high = -_LOGIT_LIMIT, _LOGIT_LIMIT
    best = (0.5, float("inf"))
    for _ in range(steps):
        middle = (low + high) / 2
        threshold = float(torch.tensor(middle, dtype=torch.float64).sigmoid())
        found = measure(threshold)
        if abs(found - share) < abs(best[1] - share):
            best = (threshold, found)
        if abs(found - share) <= tolerance:
            break
        if (found < share) == rising:
            low = middle
        else:
            high = middle
    return best


def routed_share(
    router: TokenRouter,
    prompts: Sequence[str],
    policy: str,
    checkpoint: str,
    max_tokens: int,
) -> Callable[[float], float]:
    """A `measure` for `by_share`: runs the prompts through the offline engine, greedily.

    Args:
        router: the deployment, small model first.
        checkpoint: its file, relative to the model repository.
    """

    def measure(threshold: float) -> float:
        params = json.dumps({"checkpoint": checkpoint, "threshold": threshold})
        results = router.generate(
            list(prompts), max_tokens=max_tokens, policy=policy, policy_params=params, temperature=0.0
        )
        small = sum(result.tokens_by_model.get(router.models[0], 0) for result in results)
        return 1.0 - small / sum(sum(result.tokens_by_model.values()) for result in results)

    return measure
