"""Routing probabilities and committed tokens, from counted routes.

The Markov model is closed: when a response ends, another one starts. So an end counts as a move to the entry model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenrouter.metrics_page import Scrape
from tokenrouter.statistics import END

DIGITS = 6


@dataclass(slots=True)
class Row:
    """Moves of one model: how many to each target, and how many of those committed their token."""

    moves: dict[str, float] = field(default_factory=dict)
    committed: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.moves.values())

    def add(self, target: str, moves: float, committed: bool) -> None:
        self.moves[target] = self.moves.get(target, 0.0) + moves
        self.committed[target] = self.committed.get(target, 0.0) + moves * committed

    def probabilities(self) -> dict[str, float]:
        """Rounded, and summing to 1: the largest takes what rounding leaves."""
        rounded = {target: round(moves / self.total, DIGITS) for target, moves in self.moves.items()}
        largest = max(rounded, key=lambda target: rounded[target])
        rounded[largest] = round(1.0 - sum(p for target, p in rounded.items() if target != largest), DIGITS)
        return {target: p for target, p in rounded.items() if p > 0}

    def commits(self) -> dict[str, float]:
        """Mean tokens per move, by target."""
        return {target: round(self.committed[target] / moves, 3) for target, moves in self.moves.items()}


def read_rows(delta: Scrape, models: Sequence[str], entry: str) -> dict[str, Row]:
    """Moves of every model from the difference of two scrapes; moves to models that made no step are left out."""
    rows = {}
    for model in models:
        row = rows[model] = Row()
        for target in delta.labels("tokenrouter_routes", "target", model=model):
            for committed in (False, True):
                label = str(int(committed))
                count = delta.value("tokenrouter_routes", model=model, target=target, committed=label)
                place = entry if target == END else target
                if count > 0 and place in models:
                    row.add(place, count, committed)
    return rows


def entry_model(delta: Scrape, models: Sequence[str]) -> tuple[str, dict[str, float]]:
    """Where most responses began, and how many began where: visits that no other model handed over."""
    started = {
        model: delta.value("tokenrouter_visits", model=model) - delta.value("tokenrouter_handoffs_in", model=model)
        for model in models
    }
    return max(models, key=lambda model: started[model]), started
