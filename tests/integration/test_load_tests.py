"""The load tests themselves: locust with both users, closed and open loop, and a short soak."""

from __future__ import annotations

import csv
import math
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from perf.load.soak.clients import Workload
from perf.load.soak.run import Plan, soak
from tests.support.waiting import PATIENCE_S, metric, until, wait_idle
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]
RATE = 20.0


@contextmanager
def locust(grpc_url: str, http_url: str, summary: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """Locust for at most a minute; a test that saw enough ends it earlier."""
    command = [
        *(sys.executable, "-m", "locust", "-f", str(REPOSITORY_ROOT / "perf" / "load" / "locustfile.py"), "--headless"),
        *("--run-time", "60s", "--stop-timeout", "20s", "--summary", str(summary)),
        *("--url", grpc_url, "--http-url", http_url.removeprefix("http://"), *options),
    ]
    process = subprocess.Popen(
        command, cwd=REPOSITORY_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def row_of(process: subprocess.Popen[str], summary: Path) -> tuple[int, dict[str, str]]:
    """Exit code and row of the table of a locust that was told to end."""
    process.terminate()
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert summary.is_file(), output
    with summary.open(newline="") as file:
        (row,) = csv.DictReader(file)
    return process.returncode, row


def test_locust_drives_both_endpoints_in_a_closed_and_an_open_loop(shared: TritonServer, tmp_path: Path) -> None:
    """The finish reason tells the two loops' responses apart: those of the closed one are cut."""
    files = [tmp_path / f"{name}.csv" for name in ("closed", "open")]
    both, urls = ("GrpcStreamUser", "HttpStreamUser"), (shared.grpc_url, shared.http_url)
    finished = partial(metric, shared, "finished", model="tokenrouter")
    cut, whole = finished(reason="length"), finished(reason="stop")
    with (
        locust(*urls, files[0], "--max-tokens", "10", "--users", "4", "--spawn-rate", "4", *both) as closed_loop,
        locust(*urls, files[1], "--users", "2", "--spawn-rate", "2", "--arrival-rate", f"{RATE}", *both) as open_loop,
    ):
        until(lambda: finished(reason="length") - cut > 60, what="responses of the closed loop")
        until(lambda: finished(reason="stop") - whole > 60, what="responses of the open loop")
        (code, closed), (open_code, opened) = row_of(closed_loop, files[0]), row_of(open_loop, files[1])
    assert (code, open_code) == (0, 0)
    assert closed["errors"] == opened["errors"] == "0"
    assert int(closed["requests"]) > 10
    assert 0 < float(closed["time_to_first_token_ms.p50"]) < float(closed["latency_ms.p50"])
    # Requests are due at random; five standard deviations.
    due = RATE * float(opened["seconds"])
    assert 20 < int(opened["requests"]) < due + 5 * math.sqrt(due)


def test_what_the_server_refuses_counts_as_an_error_in_the_exit_code(shared: TritonServer, tmp_path: Path) -> None:
    summary = tmp_path / "refused.csv"
    options = ("--users", "1", "--fields", '{"top_p": 7}', "--run-time", "1s", "GrpcStreamUser")
    with locust(shared.grpc_url, shared.http_url, summary, *options) as process:
        process.wait(PATIENCE_S)
        code, refused = row_of(process, summary)
    assert code == 1
    assert refused["requests"] == "0"
    assert int(refused["errors"]) > 0


@pytest.mark.parametrize("loop", [(), ("--arrival-rate", "5")], ids=["closed", "open"])
def test_requests_that_hang_at_the_end_count_as_errors_in_the_exit_code(tmp_path: Path, loop: tuple[str, ...]) -> None:
    summary = tmp_path / "hung.csv"
    with socket.create_server(("127.0.0.1", 0)) as stuck:
        address = f"127.0.0.1:{stuck.getsockname()[1]}"
        options = ("--users", "2", "--spawn-rate", "2", "--run-time", "2s", "--stop-timeout", "1s", *loop)
        with locust(address, address, summary, *options, "GrpcStreamUser", "HttpStreamUser") as process:
            process.wait(PATIENCE_S)
            code, row = row_of(process, summary)
    assert code == 1
    assert row["requests"] == "0"
    assert int(row["errors"]) >= 2


def test_a_short_soak_finds_nothing(shared: TritonServer) -> None:
    """As long as it takes until there is enough to judge."""
    workload = Workload([f"prompt {i}" for i in range(7)], max_tokens=20, policies=("", "random"), cancel_every=4)
    reports: list[float] = []
    for seconds in (3.0, 12.0, 40.0):
        plan = Plan(seconds, 8, warm_up_s=seconds / 8, interval_s=seconds / 20, limit=0.2)
        outcome = soak(shared, workload, plan, lambda _, share: reports.append(share))
        assert not outcome.failures
        assert reports
        if outcome.requests.get("stop", 0) > 50:
            break
    assert outcome.requests["stop"] > 50
    assert outcome.requests["cancelled"] > 10
    assert outcome.tokens > 5 * outcome.requests["stop"]
    assert {row.process for row in outcome.growth} == {"tritonserver", *shared.stub_pids()}


def test_a_soak_stops_at_the_first_errors(shared: TritonServer) -> None:
    workload = Workload(["x"], max_tokens=20, policies=("no-such-policy",))
    plan = Plan(60.0, 2, warm_up_s=1.0)
    outcome = soak(shared, workload, plan, lambda *_: None)
    assert outcome.seconds < plan.seconds / 2
    assert any("no-such-policy" in failure for failure in outcome.failures)
    wait_idle(shared)
