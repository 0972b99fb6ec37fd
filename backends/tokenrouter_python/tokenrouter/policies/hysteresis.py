"""Who writes a token, given what was decided before: R2R's strategies with a memory, one memory per request.

Source: thu-nics/R2R, r2r/utils/switching.py; the classes are named below. There a strategy has one memory for a whole
batch, read and written row by row; here every request has its own, so that neighbours decide nothing. Whoever wrote
last, the rule sees the small model's signal of every position once, and the large model writes one token at a time.

A memory is a value: `after` returns the next one and changes nothing. So it can be kept per position, and taken back.
Signals are float32, and are compared and averaged in float32, as the source's tensors are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from tokenrouter.messages import Measure


@dataclass(frozen=True, slots=True)
class Memory:
    """What is known of the positions before.

    Attributes:
        large: whether the last decision was the large model; so it is before the first one.
        values: the momentum, or the window of signals, oldest first.
    """

    large: bool = True
    values: tuple[float, ...] = ()

    @classmethod
    def of(cls, plain: list[Any] | None) -> Memory:
        """From what `plain` gave, after any journey; None is the beginning."""
        return cls() if plain is None else cls(bool(plain[0]), tuple(plain[1]))

    def plain(self) -> list[Any]:
        """As lists, which a message can carry."""
        return [self.large, list(self.values)]


class Rule(Protocol):
    """One of the rules below."""

    def after(self, memory: Memory, signals: Sequence[float]) -> Memory:
        """The memory behind a position with these signals; its `large` is the decision on that position's token."""
        ...

    def measures(self, memory: Memory, signals: Sequence[float]) -> list[Measure]:
        """What decides on that position, beside its threshold."""
        ...


@dataclass(frozen=True, slots=True)
class Momentum:
    """MomentumSwitching: a moving average of how many tokens were simple, and a bound for either direction.

    m' = factor m + (1 - factor) [aleatoric < threshold], from m = 0. The large model writes iff m' <= `to_large`, or
    iff m' <= `to_small` if it wrote last.
    """

    threshold: float
    factor: float
    to_large: float
    to_small: float

    def after(self, memory: Memory, signals: Sequence[float]) -> Memory:
        """Signals: the aleatoric uncertainty."""
        simple = np.float32(signals[0]) < np.float32(self.threshold)
        old = memory.values[0] if memory.values else 0.0
        momentum = self.factor * old + (1 - self.factor) * (1.0 if simple else 0.0)
        return Memory(momentum <= (self.to_small if memory.large else self.to_large), (momentum,))

    def measures(self, memory: Memory, signals: Sequence[float]) -> list[Measure]:
        """The momentum."""
        bound = self.to_small if memory.large else self.to_large
        return [Measure("momentum", self.after(memory, signals).values[0], "<=", bound)]


@dataclass(frozen=True, slots=True)
class Rolling:
    """The rules with a window: the large model writes on until the mean of its window is simple.

    Attributes:
        window: most signals that are averaged.
        complex: from the signals of a position, whether the small model's token is not simple.
        mean_is_complex: of the window's mean; the signal that is averaged is the first one.
        counts_first: whether the window begins with the position at which the small model was left, or behind it.
        limits: name and threshold of each signal.
    """

    window: int
    complex: Callable[[Sequence[float]], bool]
    mean_is_complex: Callable[[np.float32], bool]
    counts_first: bool
    limits: tuple[tuple[str, float], ...]

    def after(self, memory: Memory, signals: Sequence[float]) -> Memory:
        """Signals: what `complex` takes."""
        if not memory.large:
            large = self.complex(signals)
            values: tuple[float, ...] = (signals[0],) if self.counts_first else ()
        else:
            values = (*memory.values, signals[0])[-self.window :]
            large = self.mean_is_complex(_mean(values))
        return Memory(large, values if large else ())

    def measures(self, memory: Memory, signals: Sequence[float]) -> list[Measure]:
        """The signals where the small model wrote last, else the window's mean."""
        if not memory.large:
            pairs = zip(self.limits, signals, strict=True)
            return [Measure(name, float(value), ">=", limit) for (name, limit), value in pairs]
        (name, limit), values = self.limits[0], (*memory.values, signals[0])[-self.window :]
        return [Measure(f"mean {name}", float(_mean(values)), ">=", limit)]


def rolling(threshold: float, entropy_threshold: float, window: int) -> Rolling:
    """SingleRollingWindowSwitching: simple iff aleatoric < threshold or entropy < entropy_threshold.

    Signals: aleatoric uncertainty and entropy.
    """
    limit, other = np.float32(threshold), np.float32(entropy_threshold)
    return Rolling(
        window,
        complex=lambda signals: not (np.float32(signals[0]) < limit or np.float32(signals[1]) < other),
        mean_is_complex=lambda mean: bool(mean >= limit),
        counts_first=True,
        limits=(("aleatoric", threshold), ("entropy", entropy_threshold)),
    )


def duo_rolling(threshold: float, window: int) -> Rolling:
    """DuoRollingWindowSwitching: simple iff aleatoric < threshold. Its window of the small model decides nothing."""
    return _below(threshold, window, counts_first=False, name="aleatoric")


def neural_rolling(threshold: float, window: int) -> Rolling:
    """NeuralRollingWindowSwitching: simple iff p(divergent) < threshold."""
    return _below(threshold, window, counts_first=True, name="p")


def _below(threshold: float, window: int, *, counts_first: bool, name: str) -> Rolling:
    limit = np.float32(threshold)
    return Rolling(
        window,
        complex=lambda signals: not np.float32(signals[0]) < limit,
        mean_is_complex=lambda mean: not mean < limit,
        counts_first=counts_first,
        limits=((name, threshold),),
    )


def _mean(values: Sequence[float]) -> np.float32:
    total = np.float32(0.0)
    for value in values:
        total = total + np.float32(value)
    return np.float32(total / np.float32(len(values)))
