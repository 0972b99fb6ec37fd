"""Weights and inputs of the vectors, by formulas, so that a file of vectors holds results only."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def weight(name: str, number: int, shape: Sequence[int]) -> Tensor:
    """A tensor by its place in the order of names: 0.5 sin(1 + i + 3 number) at flat index i, plus 1 for norms."""
    flat = [0.5 * math.sin(1 + i + 3 * number) for i in range(math.prod(shape))]
    norm = name.endswith("weight") and ("layer_norm" in name or "output_layer.0" in name)
    return torch.tensor(flat).reshape(tuple(shape)) + norm


def state(shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """A state dict with these shapes."""
    return {name: weight(name, j, shape) for j, (name, shape) in enumerate(sorted(shapes.items()))}


def signals(requests: int, positions: int, *, vocabulary: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [R, T, V], with evidence on either side of the thresholds, hidden states [R, T, H], tokens [R, T]."""
    r = torch.arange(requests, dtype=torch.float64)[:, None, None]
    t = torch.arange(positions, dtype=torch.float64)[None, :, None]

    def waves(width: int) -> Tensor:
        return (1.3 * (1 + r + 3 * t + 7 * torch.arange(width, dtype=torch.float64))).sin()

    steepness = 0.2 + 14 * (0.45 * (t + 5 * r)).sin() ** 2
    logits = waves(vocabulary) ** 3 * steepness + 10 + 20 * (0.61 * t + r).cos() ** 2
    return logits.float(), waves(hidden).float(), logits.argmax(-1)


def written(leaves: Tensor) -> str:
    """Decisions [T] bool as letters: L where the large model writes, s where the small one does."""
    return "".join("L" if each else "s" for each in leaves)
