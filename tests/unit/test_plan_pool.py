"""Deployments that are simulated in several processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.support.waiting import PATIENCE_S, ended, until
from tools.dtmc.profile import load_profile
from tools.plan.candidate import Candidate
from tools.plan.demand import Demand, Objectives
from tools.plan.evaluate import TRIED
from tools.plan.pool import Pool

FILE = Path(__file__).parents[2] / "configs" / "profiles" / "r2r_batch_times.yaml"
R2R = load_profile(FILE)


def test_processes_find_what_one_finds() -> None:
    demand, objectives = Demand(10.0, 20, 20.0), Objectives(400.0, 150.0)
    tried = [Candidate((1, 1)), Candidate((1, 2)), Candidate((2, 2))]
    with Pool(R2R, demand, objectives) as one, Pool(R2R, demand, objectives, workers=2) as two:
        assert one.predict(tried, 60, least=TRIED) == two.predict(tried, 60, least=TRIED)


def test_nobody_goes_on_planning_after_the_command_was_killed() -> None:
    load = ("--rate", "2000", "--prompt-tokens", "200", "--output-tokens", "300")  # minutes of work
    objectives = ("--ttft-p99-ms", "500", "--itl-p99-ms", "120")
    process = subprocess.Popen([sys.executable, "-m", "tools.plan", "--profile", str(FILE), *load, *objectives])
    try:
        workers = until(lambda: _workers(process.pid), within_s=4 * PATIENCE_S, what="processes simulate")
    finally:
        process.kill()
        process.wait()
    until(lambda: all(ended(each.pid) for each in workers), what="they end")


def _workers(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if "spawn_main" in " ".join(child.cmdline())]
