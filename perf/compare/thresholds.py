"""Thresholds of every profile, searched once and kept in a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from perf.baselines.limits import best_thresholds, throughput
from perf.baselines.turns import RULES
from perf.compare.cells import MODEL_SYNC, OURS
from tools.dtmc.profile import Profile, dump_profile
from tools.dtmc.search import search

FILE = Path(__file__).resolve().parents[1] / "results" / "comparison_thresholds.json"

ByInFlight = Mapping[int, Mapping[str, int]]
"""In flight -> model -> threshold; empty is eager."""


@dataclass(frozen=True)
class Ours:
    """Thresholds by model, and tokens per second without overhead with them and with all thresholds 1."""

    thresholds: dict[str, int]
    tokens_per_second: float
    eager_tokens_per_second: float


@dataclass(frozen=True)
class ModelSync:
    """Thresholds in the order of the models, and tokens per second without overhead."""

    thresholds: tuple[int, ...]
    tokens_per_second: float


@dataclass
class _Entry:
    profile: str
    ours: Ours | None = None
    model_sync: ModelSync | None = None


class Tuning:
    """Best thresholds.

    Args:
        path: where they are kept. An entry whose profile has changed is searched again.
        known: a file of earlier ones, which is only read.
    """

    def __init__(self, path: Path, known: Path | None = None) -> None:
        self._path = path
        self._kept = _read(path)
        self._known = _read(known) if known is not None else {}

    @classmethod
    def beside(cls, csv: Path) -> Tuning:
        """Of a comparison: what is shipped is known, and what it adds lies beside its rows."""
        return cls(csv.with_name(FILE.name), FILE)

    def ours(self, name: str, profile: Profile, in_flight: int) -> Ours:
        """For delayed batching, by `tools.dtmc`."""
        entry = self._entry(name, profile, in_flight)
        if entry.ours is None:
            found = search(profile, in_flight)
            entry.ours = Ours(found.thresholds, found.tokens_per_second, found.eager_tokens_per_second)
            self._save()
        return entry.ours

    def model_sync(self, name: str, profile: Profile, in_flight: int) -> ModelSync:
        """For one model at a time, by `baselines.limits`."""
        entry = self._entry(name, profile, in_flight)
        if entry.model_sync is None:
            rate, rule = best_thresholds(profile, in_flight)
            entry.model_sync = ModelSync(rule.thresholds, rate)
            self._save()
        return entry.model_sync

    def rate(self, system: str, name: str, profile: Profile, in_flight: int) -> float:
        """Tokens per second of a routed system without any overhead."""
        if system in RULES:
            return throughput(profile, in_flight, RULES[system])
        if system == MODEL_SYNC:
            return self.model_sync(name, profile, in_flight).tokens_per_second
        found = self.ours(name, profile, in_flight)
        return found.tokens_per_second if system == OURS else found.eager_tokens_per_second

    def table(self, name: str, profile: Profile, in_flight: Sequence[int]) -> ByInFlight:
        """Ours for these numbers in flight, and for those just below: between two responses one is missing.

        Three models have fewer, since a search takes them a minute.
        """
        below = (0, 1, 2) if len(profile.names) == 2 else (0,)
        numbers = {max(1, lower) for n in in_flight for lower in (*(n - less for less in below), n // 2)}
        return {n: self.ours(name, profile, n).thresholds for n in sorted(numbers)}

    def _entry(self, name: str, profile: Profile, in_flight: int) -> _Entry:
        text, key = dump_profile(profile), f"{name}, {in_flight} in flight"
        for entries in (self._kept, self._known):
            found = entries.get(key)
            if found is not None and found.profile == text:
                break
        else:
            found = _Entry(text)
        self._kept[key] = found
        return found

    def _save(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_bytes(msgspec.json.format(msgspec.json.encode(self._kept, order="sorted"), indent=1) + b"\n")


def _read(path: Path) -> dict[str, _Entry]:
    return msgspec.json.decode(path.read_bytes(), type=dict[str, _Entry]) if path.is_file() else {}
