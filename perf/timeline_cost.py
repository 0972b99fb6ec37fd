"""`python -m perf.timeline_cost`: what a recording of the timeline costs, in alternating windows with and without one.

First the server's state machines alone, as in `perf.step_cost`: CPU time of their thread per token, engines that take
no time. Then a server with the step times of a profile and requests in flight: tokens per second, the time included in
which recordings are encoded and sent. Ratios are those of medians. Example:

    python -m perf.timeline_cost --inflight 16 --windows 10 --seconds 3
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from perf.command import run
from perf.emulated.deployment import EmulatedDeployment
from perf.emulated.repository import write_emulated_repository
from perf.rows import Columns, report, shown, table
from perf.step_cost import Travelling
from tokenrouter.inprocess import InProcessDriver
from tokenrouter.request import RequestFields
from tokenrouter.timeline.client import record
from tokenrouter.timeline.machines import MachineRecorder
from tools.dtmc.profile import load_profile
from tools.load import ClosedLoop, request_bytes
from tools.targets import target_file

_PROFILE = Path(__file__).resolve().parents[1] / "configs" / "profiles" / "r2r_qwen3_0.6b_32b.yaml"
_ENDLESS = 1 << 19
_COLUMNS: Columns = {
    "what": ("what", ""),
    "off": ("off", ".2f"),
    "on": ("on", ".2f"),
    "on / off": ("ratio", ".4f"),
    "spread of off": ("spread", ".2%"),
    "windows each": ("windows", ""),
}


def _row(what: str, off: list[float], on: list[float]) -> dict[str, Any]:
    middle = statistics.median(off)
    spread = (statistics.quantiles(off, n=4)[2] - statistics.quantiles(off, n=4)[0]) / middle
    ratio = statistics.median(on) / middle
    return {
        "what": what,
        "off": middle,
        "on": statistics.median(on),
        "ratio": ratio,
        "spread": spread,
        "windows": len(on),
    }


def machines(inflight: int, windows: int, tokens: int) -> dict[str, Any]:
    """CPU time per token of the state machines, in microseconds."""
    entry = {"policy": "random", "policy_params": {"p": 0.35}, "max_inflight": inflight, "aliases": {}}
    off: list[float] = []
    on: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        repository = write_emulated_repository(Path(folder), step_ms={"small": 0.0, "large": 0.0}, entry=entry)
        with Travelling.load(repository, entry="tokenrouter") as driver:
            for seed in range(inflight):
                driver.submit(RequestFields(text_input="abcdefgh", max_tokens=_ENDLESS, seed=seed, stream=True))
            _us_per_token(driver, tokens)
            for _ in range(windows):
                off.append(_us_per_token(driver, tokens))
                recorder = MachineRecorder(
                    driver.orchestrator, driver.subservers.values(), name="", now_ns=time.monotonic_ns()
                )
                on.append(_us_per_token(driver, tokens))
                recorder.stop(now_ns=time.monotonic_ns())
            driver.cancel(driver.orchestrator.keys())
    return _row(f"state machines, {inflight} in flight: CPU us per token", off, on)


def _us_per_token(driver: InProcessDriver, tokens: int) -> float:
    written, began_ns = 0, time.thread_time_ns()
    while written < tokens:
        written += sum(len(update.tokens) for update in driver.turn())
    return 1e-3 * (time.thread_time_ns() - began_ns) / written


def server(inflight: int, windows: int, seconds: float) -> dict[str, Any]:
    """Streamed messages per second of a server; nearly every one is a token."""
    deployment = EmulatedDeployment(load_profile(_PROFILE), "markov", most_in_flight=inflight)
    off: list[float] = []
    on: list[float] = []
    with deployment.serve() as served:

        def request(number: int) -> bytes:
            return request_bytes("tokenrouter", "abcdefgh", max_tokens=256, seed=number)

        with ClosedLoop(served.grpc_url, request, inflight) as loop:
            time.sleep(seconds)
            for _ in range(windows):
                off.append(_rate(loop, lambda: time.sleep(seconds)))
                on.append(_rate(loop, lambda: record(served.grpc_url, seconds)))
                loop.check()
    return _row(f"server, {inflight} in flight: messages per second", off, on)


def _rate(loop: ClosedLoop, during: Callable[[], object]) -> float:
    before, began_s = len(loop.arrivals.times), time.perf_counter()
    during()
    return (len(loop.arrivals.times) - before) / (time.perf_counter() - began_s)


def main(
    inflight: Annotated[list[int], typer.Option(min=1, help="Responses that run at once.")] = [1, 16],  # noqa: B006
    windows: Annotated[int, typer.Option(min=3, help="Windows with and without a recording, each.")] = 10,
    tokens: Annotated[int, typer.Option(min=100, help="Tokens per window of the state machines.")] = 1000,
    seconds: Annotated[float, typer.Option(min=0.5, max=60.0, help="Length of the server's windows.")] = 3.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Also write this file.", callback=target_file(".csv"))] = None,
) -> None:
    rows = [machines(n, windows, tokens) for n in inflight] + [server(n, windows, seconds) for n in inflight]
    report(rows, table(shown(row, _COLUMNS) for row in rows), as_json=as_json, csv_file=csv)


if __name__ == "__main__":
    run(main)
