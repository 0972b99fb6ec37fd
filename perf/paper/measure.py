"""Measures cells: a running server with emulated engines, or the barrier's single process with the same engines."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path

from perf.baselines.inprocess import SynchronousBaseline
from perf.baselines.turns import step_sync
from perf.emulated.deployment import EAGER, EmulatedDeployment, Thresholds
from perf.emulated.repository import byte_tokenizer
from perf.load.requests import Load
from perf.paper.cells import Cell, Key, profile_of, searched
from perf.rows import Row
from perf.serving.run import ENDLESS, Plan
from perf.serving.study import Report, Study


def measure_cells(cells: Iterable[Cell], plan: Plan, report: Report) -> Iterator[tuple[Key, Row]]:
    """Every different cell once, as soon as it is measured, as a row of `perf.serving`."""
    around: dict[str, dict[str, float]] = {}
    for (policy, thresholds), keys in groupby(sorted({cell.key for cell in cells}), key=lambda key: key[:2]):
        numbers = [n for _, _, n in keys]
        study = Study(profile_of(policy), policy, plan, numbers)
        if policy not in around:
            # At one number in flight: it depends little on it, see docs/scheduling.md.
            middle = replace(study, in_flight=[numbers[len(numbers) // 2]])
            around[policy] = dict(middle.calibrated(report).around_ms)
        study = replace(study, around_ms=around[policy])
        rows = _served(study, thresholds, report) if thresholds else _barrier(study, report)
        for n, row in zip(numbers, rows, strict=True):
            yield (policy, thresholds, n), row


def _served(study: Study, thresholds: tuple[int, ...], report: Report) -> Iterator[Row]:
    named = dict(zip(study.profile.names, thresholds, strict=True))
    label = f"thresholds {' '.join(map(str, thresholds))}"
    setting = Thresholds(label, {0: named}) if max(thresholds) > 1 else EAGER
    return study.served(setting, partial(searched, study.policy), report)


def _barrier(study: Study, report: Report) -> Iterator[Row]:
    """Engines, sampler, policy and prompts are the server's, but there is no server.

    See `baselines.inprocess`. Engines are as much faster as those of the server, although one process needs less time
    around them; that favours the barrier.
    """
    plan, tokenizer = study.plan, byte_tokenizer()
    seconds = plan.seconds * plan.repeats

    def prompt(index: int) -> list[int]:
        return list(tokenizer.encode(plan.prompt(index)).ids)

    with tempfile.TemporaryDirectory(prefix="tokenrouter-perf-") as folder:
        deployment = EmulatedDeployment(study.profile, study.policy, max(study.in_flight), EAGER, study.around_ms)
        repository = deployment.write(Path(folder))
        for done, n in enumerate(study.in_flight):
            report(f"barrier, {n} in flight", done / len(study.in_flight))
            load = Load(n, prompt, ENDLESS, warm_up_s=plan.warm_up_s, seconds=seconds, longest_s=seconds)
            with SynchronousBaseline(repository) as driver:
                rate = driver.run(load, step_sync).tokens_per_second
            yield {"tokens_per_second": rate, **{f"around_ms.{name}": ms for name, ms in study.around_ms.items()}}
