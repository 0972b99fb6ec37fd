"""Helps policies to say what they look at: tensors and arrays to measures, one row each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokenrouter.messages import Measure


def measured(name: str, values: Any, relation: str, threshold: Any) -> list[tuple[Measure, ...]]:
    """One measure per row.

    Args:
        name: of the measure.
        values: [B] numbers: a tensor, an array or a sequence.
        relation: with which `threshold`, one number or [B], makes the request leave.
    """
    numbers = _plain(values)
    limits = _plain(threshold)
    limits = limits if isinstance(limits, list) else [limits] * len(numbers)
    return [
        (Measure(name, float(value), relation, float(limit)),) for value, limit in zip(numbers, limits, strict=True)
    ]


def joined(*rows: Sequence[tuple[Measure, ...]]) -> list[tuple[Measure, ...]]:
    """Several measures per row."""
    return [tuple(measure for part in parts for measure in part) for parts in zip(*rows, strict=True)]


def _plain(values: Any) -> Any:
    return values.tolist() if hasattr(values, "tolist") else values
