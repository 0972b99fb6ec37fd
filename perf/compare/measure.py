"""Measures systems in cells: one server, or one set of engines in this process, for all cells that can share it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Protocol

from perf.baselines.inprocess import SynchronousBaseline
from perf.baselines.standard import StandardServing
from perf.baselines.turns import RULES, Rule, Thresholds
from perf.compare import runs
from perf.compare.cells import Cell, System
from perf.compare.thresholds import ByInFlight, Tuning
from perf.load.requests import Load, Run
from tools.dtmc.profile import Profile
from tools.tritonserver.server import TritonServer

Progress = Callable[[str], None]
Found = tuple[Cell, System, dict[str, float], float]
"""Cell, system, what was measured, and tokens per second without any overhead (NaN where none is known)."""


class Setting(Protocol):
    """The engines of a comparison, and its requests: all `policies` and `workloads`, so many times shorter."""

    policies: tuple[str, ...]
    workloads: tuple[str, ...]
    scale: int

    def kind(self, cell: Cell) -> str:
        """Cells of the same kind share models, step times and routing; tuned thresholds are kept under this name."""
        ...

    def profile(self, cell: Cell) -> Profile:
        """Step times and routing, as far as they are known."""
        ...

    def repository(self, folder: Path, cell: Cell, thresholds: ByInFlight, most: int) -> Path:
        """Writes a model repository for cells of this kind, with up to `most` in flight; returns the folder."""
        ...

    def load(self, cell: Cell) -> Load: ...

    def comparable(self, cell: Cell) -> bool:
        """Whether the profile says all about step times, so that the exact models hold."""
        ...


def measure(
    setting: Setting,
    tuning: Tuning,
    cells: Iterable[Cell],
    systems: Sequence[System],
    report: Progress = lambda text: None,
) -> Iterator[Found]:
    """Every system in every cell; systems without routing once per workload and number in flight."""
    done: set[tuple[str, Cell]] = set()
    for _, group in groupby(sorted(cells, key=setting.kind), key=setting.kind):
        own = list(group)
        for where, chosen in groupby(sorted(systems, key=lambda s: s.where), key=lambda s: s.where):
            work = [(s, c) for s in chosen for c in own if (s.name, c.of(s)) not in done]
            done |= {(s.name, c.of(s)) for s, c in work}
            if work:
                yield from _Kind(setting, tuning, where, own).measure(work, report)


class _Kind:
    """Cells of one kind, at one place."""

    def __init__(self, setting: Setting, tuning: Tuning, where: str, cells: Sequence[Cell]) -> None:
        self._setting, self._tuning, self._where = setting, tuning, where
        self._in_flight = sorted({cell.in_flight for cell in cells})
        self._cell = cells[0]
        self._name, self._profile = setting.kind(self._cell), setting.profile(self._cell)

    def measure(self, work: Sequence[tuple[System, Cell]], report: Progress) -> Iterator[Found]:
        report(f"{self._name}: starting ({self._where})")
        with tempfile.TemporaryDirectory(prefix="tokenrouter-compare-") as folder:
            tuned = self._where == "tuned"
            thresholds = self._tuning.table(self._name, self._profile, self._in_flight) if tuned else {}
            repository = self._setting.repository(Path(folder), self._cell, thresholds, max(self._in_flight))
            with self._runner(repository) as run:
                for system, cell in work:
                    report(f"{self._name}, {cell.workload}, {cell.in_flight} in flight: {system.name}")
                    found = runs.summarise(run(system, cell))
                    yield cell.of(system), system, found, self._limit(system, cell)

    @contextmanager
    def _runner(self, repository: Path) -> Iterator[Callable[[System, Cell], Run]]:
        """How one system runs one cell."""
        load = self._setting.load
        if self._where == "process":
            with SynchronousBaseline(repository) as engines:
                yield lambda system, cell: engines.run(load(cell), self._rule(system, cell.in_flight))
        elif self._where == "standard":
            with StandardServing(repository) as serving:
                yield lambda system, cell: runs.standard(serving, load(cell), self._rate(system, cell))
        else:
            with TritonServer(repository) as server:
                yield lambda system, cell: runs.served(server.grpc_url, system.model or "tokenrouter", load(cell))

    def _rule(self, system: System, in_flight: int) -> Rule:
        if system.name in RULES:
            return RULES[system.name]
        return Thresholds(self._tuning.model_sync(self._name, self._profile, in_flight).thresholds)

    def _limit(self, system: System, cell: Cell) -> float:
        if not self._setting.comparable(cell):
            return float("nan")
        if system.model:
            return 1e3 * cell.in_flight / self._profile.models[system.model].step_time_ms(cell.in_flight)
        return self._rate(system, cell)

    def _rate(self, system: System, cell: Cell) -> float:
        return self._tuning.rate(system.name, self._name, self._profile, cell.in_flight)
