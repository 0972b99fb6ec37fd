"""Measures systems in cells: one server, or one set of engines in this process, for all cells that can share it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

from perf.baselines.inprocess import SynchronousBaseline
from perf.baselines.standard import StandardServing
from perf.baselines.turns import RULES, Rule, Thresholds
from perf.compare import runs
from perf.compare.cells import Cell, System
from perf.compare.results import Results
from perf.compare.settings import Setting
from perf.compare.thresholds import Tuning
from perf.load.requests import Run
from tools.progress import LateProgress
from tools.tritonserver.server import TritonServer

Report = Callable[[str], None]


def add_rows(
    results: Results, path: Path, setting: Setting, cells: Sequence[Cell], systems: Mapping[str, System], **same: object
) -> None:
    """Measures every system in every cell; systems without routing once per workload and number in flight.

    Args:
        results: rows so far.
        path: their file; written after each row, so that nothing is lost when a run is stopped. Thresholds that had to
            be searched lie beside it.
        setting: engines and requests.
        cells: what to measure.
        systems: the same, by the name that their rows get.
        same: columns of all rows.
    """
    names = {system: name for name, system in systems.items()}
    with LateProgress() as progress:
        done, total = 0, len(cells) * len(systems)

        def told(text: str) -> None:
            progress(text, min(1.0, done / total))

        for cell, system, found in _measured(setting, Tuning.beside(path), cells, list(names), told):
            results.add(cell, names[system], {**same, **found})
            results.save(path)
            done += 1


def _measured(
    setting: Setting, tuning: Tuning, cells: Sequence[Cell], systems: Sequence[System], report: Report
) -> Iterator[tuple[Cell, System, dict[str, float]]]:
    done: set[tuple[str, Cell]] = set()
    for _, group in groupby(sorted(cells, key=setting.kind), key=setting.kind):
        own = list(group)
        for where, chosen in groupby(sorted(systems, key=lambda s: s.where), key=lambda s: s.where):
            able = [(s, c) for s in chosen for c in own if s.takes(c.policy, real=setting.real)]
            work = [(s, c) for s, c in able if (s.name, c.of(s)) not in done]
            done |= {(s.name, c.of(s)) for s, c in work}
            if work:
                yield from _Kind(setting, tuning, own).measure(where, work, report)


class _Kind:
    """Cells of one kind."""

    def __init__(self, setting: Setting, tuning: Tuning, cells: Sequence[Cell]) -> None:
        self._setting, self._tuning = setting, tuning
        self._in_flight = sorted({cell.in_flight for cell in cells})
        self._cell = cells[0]
        self._name, self._profile = setting.kind(self._cell), setting.profile(self._cell)

    def measure(
        self, where: str, work: Sequence[tuple[System, Cell]], report: Report
    ) -> Iterator[tuple[Cell, System, dict[str, float]]]:
        """Columns of every system at one place; `limit`: tokens per second without overhead, NaN if not known."""
        report(f"{self._name}: starting ({where})")
        with tempfile.TemporaryDirectory(prefix="tokenrouter-compare-") as folder:
            tuned = where.startswith("tuned")
            thresholds = self._tuning.table(self._name, self._profile, self._in_flight) if tuned else {}
            repository = self._setting.repository(Path(folder) / "m", self._cell, thresholds, max(self._in_flight))
            with self._runner(where, repository, work[0][0]) as run:
                for system, cell in work:
                    report(f"{self._name}, {cell.workload}, {cell.in_flight} in flight: {system.name}")
                    found = runs.summarise(run(system, cell))
                    yield cell.of(system), system, {"limit": self._limit(system, cell), **found}

    @contextmanager
    def _runner(self, where: str, repository: Path, first: System) -> Iterator[Callable[[System, Cell], Run]]:
        """How a system at this place runs a cell."""
        load = self._setting.load
        if where == "process":
            with SynchronousBaseline(repository) as engines:
                yield lambda system, cell: engines.run(load(cell), self._rule(system, cell.in_flight))
        elif where == "standard":
            with StandardServing(repository) as serving:
                yield lambda system, cell: runs.standard(serving, load(cell), self._rate(system, cell))
        else:
            with first.beside(repository), TritonServer(repository) as server:
                yield lambda system, cell: runs.served(server.grpc_url, system, load(cell))

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
