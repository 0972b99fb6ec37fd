"""`python -m perf.step_cost`: what a step and a hand-off cost beside the engine, part by part, in CPU time.

The server's state machines run in one thread, with emulated engines that take no time, streaming responses, and every
message encoded and decoded as between the processes. CPU time of the thread, so that a busy machine changes little;
every part without those inside of it; reading the clock is in it, about 1 us each. What is not in it: Triton's own part
of a token on its way to the client, publishing (twice a second), and the GIL, for which a server's processes have one
or two threads that want it at a time. `wake-up` is half a round trip between two threads over the channel's sockets,
as elapsed time, and grows on a busy machine: a hand-off has two. Example:

    python -m perf.step_cost --inflight 1 4 16 64
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import typer

from perf.command import run
from perf.emulated.repository import write_emulated_repository
from perf.rows import Columns, report, shown, table
from tokenrouter import sampling
from tokenrouter.channel.carrier import Connected, Received
from tokenrouter.channel.unix import UnixCarrier
from tokenrouter.engines.emulated.engine import EmulatedEngine
from tokenrouter.inprocess import InProcessDriver
from tokenrouter.messages import encode
from tokenrouter.orchestrator.machine import Orchestrator
from tokenrouter.policies import calls
from tokenrouter.request import RequestFields
from tokenrouter.statistics import SubserverStatistics
from tokenrouter.subserver.machine import Subserver
from tokenrouter.subserver.stepped import SteppingRunner
from tools.targets import target_file

STEP, HANDOFF = "step", "hand-off"
ENGINE = "engine (emulated)"
PARTS: tuple[tuple[str, str, Any, str], ...] = (
    (STEP, "batcher poll", SteppingRunner, "poll"),
    (STEP, ENGINE, EmulatedEngine, "step"),
    (STEP, "sampling", sampling, "sample"),
    (STEP, "policy", calls, "route"),
    (STEP, "statistics", SubserverStatistics, "step_started"),
    (STEP, "statistics", SubserverStatistics, "step_finished"),
    (STEP, "rows and reports", Subserver, "run_step"),
    (HANDOFF, "at the models", Subserver, "handle"),
    (HANDOFF, "orchestrator", Orchestrator, "receive"),
    (HANDOFF, "updates for clients", Orchestrator, "take_updates"),
)
_ENDLESS = 1 << 19
_COLUMNS: Columns = {
    "in flight": ("inflight", ""),
    "per": ("per", ""),
    "part": ("part", ""),
    "us": ("us", ".1f"),
    "share": ("share", ".1%"),
}


class Meter:
    """CPU time by (per, part); a part that runs inside another one is not in that."""

    def __init__(self) -> None:
        self.spent_ns: dict[tuple[str, str], int] = defaultdict(int)
        self._inner = [0]

    def timed(self, key: tuple[str, str], function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def call(*args: Any, **kwargs: Any) -> Any:
            began_ns = time.thread_time_ns()
            self._inner.append(0)
            try:
                return function(*args, **kwargs)
            finally:
                took_ns = time.thread_time_ns() - began_ns
                self.spent_ns[key] += took_ns - self._inner.pop()
                self._inner[-1] += took_ns

        return call


class Travelling(InProcessDriver):
    """Messages are encoded and decoded, as they are between processes."""

    @staticmethod
    def travel(decode: Callable[[Any], Any], message: Any) -> Any:
        """Both ways of the codec."""
        return decode(encode(message))


@contextmanager
def metered(meter: Meter) -> Iterator[None]:
    """All parts are timed while the block runs."""
    with ExitStack() as stack:
        for per, part, owner, name in PARTS:
            stack.enter_context(patch.object(owner, name, meter.timed((per, part), getattr(owner, name))))
        travel = meter.timed((HANDOFF, "encoding"), Travelling.travel)
        stack.enter_context(patch.object(Travelling, "travel", staticmethod(travel)))
        yield


def measured(inflight: int, tokens: int, leave: float) -> list[dict[str, Any]]:
    """Rows for one number in flight."""
    entry = {"policy": "random", "policy_params": {"p": leave}, "max_inflight": inflight, "aliases": {}}
    meter = Meter()
    with tempfile.TemporaryDirectory() as folder:
        repository = write_emulated_repository(Path(folder), step_ms={"small": 0.0, "large": 0.0}, entry=entry)
        with Travelling.load(repository, entry="tokenrouter") as driver:
            for seed in range(inflight):
                driver.submit(RequestFields(text_input="abcdefgh", max_tokens=_ENDLESS, seed=seed, stream=True))
            _write(driver, tokens // 10)
            steps, handoffs = _counts(driver)
            with metered(meter):
                _write(driver, tokens)
            now_steps, now_handoffs = _counts(driver)
            driver.cancel(driver.orchestrator.keys())
    counts = {STEP: now_steps - steps, HANDOFF: now_handoffs - handoffs}
    rows: list[dict[str, Any]] = [
        {"inflight": inflight, "per": per, "part": part, "us": 1e-3 * spent / counts[per]}
        for (per, part), spent in meter.spent_ns.items()
    ]
    for row in rows:
        total = sum(each["us"] for each in rows if each["per"] == row["per"] and each["part"] != ENGINE)
        row["share"] = row["us"] / total if row["part"] != ENGINE else None
    return sorted(rows, key=lambda row: (row["per"] != STEP, -row["us"]))


def _write(driver: InProcessDriver, tokens: int) -> None:
    """Until so many tokens more are committed."""
    written = 0
    while written < tokens:
        written += sum(len(update.tokens) for update in driver.turn())


def _counts(driver: InProcessDriver) -> tuple[int, int]:
    """Steps of all models, and hand-offs, so far."""
    steps = sum(subserver.statistics.steps for subserver in driver.subservers.values())
    return steps, driver.orchestrator.statistics.handoffs


def wake_up_us(rounds: int = 400) -> float:
    """Median half of a round trip between two threads over the channel's sockets, in microseconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "echo.sock"
        listener = UnixCarrier(listen=path)
        over = threading.Event()

        def echo() -> None:
            while not over.is_set():
                for event in listener.poll(0.2):
                    if isinstance(event, Received):
                        listener.send(event.peer, event.payload)

        thread = threading.Thread(target=echo, daemon=True)
        thread.start()
        dialler = UnixCarrier(dial={"echo": path})
        try:
            peer = next(each.peer for each in _events(dialler) if isinstance(each, Connected))
            halves = []
            for _ in range(rounds):
                began_ns = time.perf_counter_ns()
                dialler.send(peer, b"x" * 64)
                next(each for each in _events(dialler) if isinstance(each, Received))
                halves.append((time.perf_counter_ns() - began_ns) / 2e3)
        finally:
            over.set()
            thread.join()
            dialler.close()
            listener.close()
    return statistics.median(halves)


def _events(carrier: UnixCarrier) -> Iterator[Any]:
    while True:
        yield from carrier.poll(1.0)


def main(
    inflight: Annotated[list[int], typer.Option(min=1, help="Responses that run at once.")] = [1, 16],  # noqa: B006
    tokens: Annotated[int, typer.Option(min=100, help="Tokens to write per number in flight.")] = 3000,
    leave_rate: Annotated[float, typer.Option(min=0.01, max=0.99, help="How often the small model is left.")] = 0.35,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Also write this file.", callback=target_file(".csv"))] = None,
) -> None:
    wake_up = wake_up_us()
    rows: list[dict[str, Any]] = []
    for n in inflight:
        rows += measured(n, tokens, leave_rate)
        rows.append({"inflight": n, "per": HANDOFF, "part": "wake-up, each way (elapsed)", "us": wake_up})
    report(rows, table(shown(row, _COLUMNS) for row in rows), as_json=as_json, csv_file=csv)


if __name__ == "__main__":
    run(main)
