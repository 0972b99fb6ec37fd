"""Measures systems in cells: one server, or one set of engines in this process, for all cells that can share it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count, groupby
from pathlib import Path
from typing import Protocol

from perf.baselines.inprocess import SynchronousBaseline
from perf.baselines.limits import throughput
from perf.baselines.standard import StandardServing
from perf.baselines.turns import RULES, Rule, Thresholds
from perf.compare import client
from perf.compare.cells import Cell, System
from perf.compare.summary import Summary, summarise
from perf.compare.thresholds import Tuning
from perf.load.requests import Load, Response, Run
from tokenrouter.request import RequestFields
from tools.dtmc.profile import Profile
from tools.tritonserver.server import TritonServer

# Standard serving runs for a time that is set before; whole responses should end in it.
_SPARE = 2.0

Progress = Callable[[str], None]
ByInFlight = Mapping[int, Mapping[str, int]]
"""In flight -> model -> threshold; empty is eager."""
Found = tuple[Cell, System, Summary, float]
"""Cell, system, what was measured, and tokens per second without any overhead (NaN where none is known)."""


class Setting(Protocol):
    """The engines of a comparison, and its requests."""

    def kind(self, cell: Cell) -> str:
        """Cells of the same kind share models, step times and routing; tuned thresholds are kept under this name."""
        ...

    def profile(self, cell: Cell) -> Profile:
        """Step times and routing, as far as they are known."""
        ...

    def repository(self, folder: Path, cell: Cell, thresholds: ByInFlight, most: int) -> Path:
        """Writes a model repository for cells of this kind, with up to `most` in flight; returns the folder."""
        ...

    def load(self, cell: Cell) -> Load:
        """The requests."""
        ...

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
                yield from _Kind(setting, tuning, where, sorted({c.in_flight for c in own}), own[0]).measure(
                    work, report
                )


def tuned_table(tuning: Tuning, name: str, profile: Profile, in_flight: Sequence[int]) -> ByInFlight:
    """Thresholds for these numbers in flight, and for those just below: between two responses one is missing.

    Three models have fewer, since a search takes them a minute.
    """
    below = (0, 1, 2) if len(profile.names) == 2 else (0,)
    numbers = {max(1, lower) for n in in_flight for lower in (*(n - less for less in below), n // 2)}
    return {n: tuning.ours(name, profile, n).thresholds for n in sorted(numbers)}


class _Kind:
    """Cells of one kind, at one place."""

    def __init__(self, setting: Setting, tuning: Tuning, where: str, in_flight: Sequence[int], cell: Cell) -> None:
        self._setting = setting
        self._tuning = tuning
        self._where = where
        self._in_flight = in_flight
        self._cell = cell
        self._name = setting.kind(cell)
        self._profile = setting.profile(cell)

    def measure(self, work: Sequence[tuple[System, Cell]], report: Progress) -> Iterator[Found]:
        report(f"{self._name}: starting ({self._where})")
        with tempfile.TemporaryDirectory(prefix="tokenrouter-compare-") as folder:
            thresholds: ByInFlight = {}
            if self._where == "tuned":
                thresholds = tuned_table(self._tuning, self._name, self._profile, self._in_flight)
            repository = self._setting.repository(Path(folder), self._cell, thresholds, max(self._in_flight))
            with self._runner(repository) as run:
                for system, cell in work:
                    report(f"{self._name}, {cell.workload}, {cell.in_flight} in flight: {system.name}")
                    found = summarise(run(system, cell))
                    yield cell.of(system), system, found, self._limit(system, cell)

    def _runner(self, repository: Path) -> AbstractContextManager[Callable[[System, Cell], Run]]:
        """How one system runs one cell."""
        if self._where == "process":
            return self._in_process(repository)
        return self._standard(repository) if self._where == "standard" else self._server(repository)

    @contextmanager
    def _in_process(self, repository: Path) -> Iterator[Callable[[System, Cell], Run]]:
        with SynchronousBaseline(repository) as engines:
            yield lambda system, cell: engines.run(self._setting.load(cell), self._rule(system, cell.in_flight))

    @contextmanager
    def _standard(self, repository: Path) -> Iterator[Callable[[System, Cell], Run]]:
        with StandardServing(repository) as serving:
            yield lambda system, cell: run_standard(
                serving,
                self._setting.load(cell),
                self._tuning.ours(self._name, self._profile, cell.in_flight).eager_tokens_per_second,
            )

    @contextmanager
    def _server(self, repository: Path) -> Iterator[Callable[[System, Cell], Run]]:
        with TritonServer(repository) as server:
            yield lambda system, cell: client.run(
                server.grpc_url, system.model or "tokenrouter", self._setting.load(cell)
            )

    def _rule(self, system: System, in_flight: int) -> Rule:
        if system.name in RULES:
            return RULES[system.name]
        return Thresholds(self._tuning.model_sync(self._name, self._profile, in_flight).thresholds)

    def _limit(self, system: System, cell: Cell) -> float:
        n, profile = cell.in_flight, self._profile
        if not self._setting.comparable(cell):
            return float("nan")
        if system.model:
            return 1e3 * n / profile.models[system.model].step_time_ms(n)
        if system.name in RULES:
            return throughput(profile, n, RULES[system.name])
        if self._where == "process":
            return self._tuning.model_sync(self._name, profile, n).tokens_per_second
        found = self._tuning.ours(self._name, profile, n)
        return found.tokens_per_second if self._where == "tuned" else found.eager_tokens_per_second


def run_standard(serving: StandardServing, load: Load, tokens_per_second: float) -> Run:
    """Standard serving under a load; its rate without overhead says how long whole responses take.

    Args:
        serving: the running baseline.
        load: see `Load`.
        tokens_per_second: of the same engines without overhead.
    """
    response_s = load.response_tokens * load.in_flight / tokens_per_second
    seconds = load.warm_up_s + min(load.longest_s, max(load.seconds, _SPARE * response_s))
    requests = (load.request(index) for index in count())
    fields = (RequestFields(input_ids=r.input_ids, max_tokens=r.max_tokens, seed=r.seed) for r in requests)
    found = serving.run(fields, in_flight=load.in_flight, seconds=seconds)
    responses = [
        Response(
            request=load.request(r.index), started=r.started, times=list(r.times), counts=[1] * len(r.times),
            ids=r.tokens, ended=bool(r.finish_reason),
        )
        for r in found.responses
    ]  # fmt: skip
    return Run(responses, found.started + load.warm_up_s, found.ended)
