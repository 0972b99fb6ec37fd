"""`python -m perf.micro.dtmc_speed`: wall time, CPU time and peak memory of the threshold search."""

from __future__ import annotations

import resource
import time
from multiprocessing import get_context
from pathlib import Path

from perf.command import run
from tools.dtmc.profile import load_profile
from tools.dtmc.search import search, search_table

R2R = "configs/profiles/r2r_qwen3_0.6b_32b.yaml"
ME = "configs/profiles/me_qwen3_0.6b_8b_32b.yaml"
CASES = [(R2R, 8, "search"), (R2R, 16, "search"), (R2R, 64, "search"), (ME, 16, "search"), (R2R, 16, "table")]
LINE = "{:<24} {:>4} {:<7} {:>8} {:>8} {:>6} {:>9} {:>10} {}"


def measured(case: tuple[str, int, str]) -> str:
    """The line of one case, run in this process."""
    path, inflight, kind = case
    profile = load_profile(Path(path))
    began, began_cpu = time.perf_counter(), time.process_time()
    result = search(profile, inflight) if kind == "search" else search_table(profile, inflight)[-1]
    wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    best = ",".join(f"{name}={threshold}" for name, threshold in result.thresholds.items())
    solved, rate = f"{result.evaluated}/{result.feasible}", f"{result.tokens_per_second:.1f}"
    return LINE.format(
        Path(path).stem, inflight, kind, f"{wall:.2f}", f"{cpu:.2f}", f"{peak_mb:.0f}", solved, rate, best
    )


def main() -> None:
    print(LINE.format("profile", "N", "what", "wall s", "CPU s", "MB", "solved", "tokens/s", "best"), flush=True)
    # A process per case, so that peak memory is that of the case.
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for line in pool.imap(measured, CASES):
            print(line, flush=True)


if __name__ == "__main__":
    run(main)
