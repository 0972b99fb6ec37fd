"""Names of the replicas of a model: each is a Triton model, and the first one has the model's own name."""

from __future__ import annotations


def replica_names(model: str, count: int) -> tuple[str, ...]:
    """`large`, `large_1`, `large_2`, ...

    Raises:
        ValueError: fewer than one.
    """
    if count < 1:
        raise ValueError(f"replicas of {model!r}: {count}; give 1 or more")
    return (model, *(f"{model}_{number}" for number in range(1, count)))
