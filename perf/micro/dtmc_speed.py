"""Speed of the threshold search, printed: wall and CPU time, peak memory. Run: ``python -m perf.micro.dtmc_speed``."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

from tools.dtmc.profile import load_profile
from tools.dtmc.search import search, search_table

R2R = "configs/profiles/r2r_qwen3_0.6b_32b.yaml"
ME = "configs/profiles/me_qwen3_0.6b_8b_32b.yaml"
CASES = [(R2R, 8, "search"), (R2R, 16, "search"), (R2R, 64, "search"), (ME, 16, "search"), (R2R, 16, "table")]
LINE = "{:<24} {:>4} {:<7} {:>8} {:>8} {:>6} {:>9} {:>10} {}"


def measure(path: str, inflight: int, kind: str) -> None:
    """Runs one case in this process and prints its line."""
    profile = load_profile(Path(path))
    began, began_cpu = time.perf_counter(), time.process_time()
    result = search(profile, inflight) if kind == "search" else search_table(profile, inflight)[-1]
    wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    best = ",".join(f"{name}={threshold}" for name, threshold in result.thresholds.items())
    name = Path(path).stem
    solved, rate = f"{result.evaluated}/{result.feasible}", f"{result.tokens_per_second:.1f}"
    print(
        LINE.format(name, inflight, kind, f"{wall:.2f}", f"{cpu:.2f}", f"{peak_mb:.0f}", solved, rate, best), flush=True
    )


def main() -> None:
    """One process per case, so that peak memory is that of the case."""
    if len(sys.argv) == 4:
        measure(sys.argv[1], int(sys.argv[2]), sys.argv[3])
        return
    print(LINE.format("profile", "N", "what", "wall s", "CPU s", "MB", "solved", "tokens/s", "best"), flush=True)
    for path, inflight, kind in CASES:
        subprocess.run([sys.executable, "-m", "perf.micro.dtmc_speed", path, str(inflight), kind], check=True)


if __name__ == "__main__":
    main()
