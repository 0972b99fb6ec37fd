"""The load tests themselves: locust with both users, closed and open loop, and a short soak."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

from perf.load.soak.clients import Workload
from perf.load.soak.run import Plan, soak
from tests.support.waiting import wait_idle
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

REPOSITORY_ROOT = Path(__file__).resolve().parents[2]
RUN_S = 3


def locust(server: TritonServer, summary: Path, *options: str) -> subprocess.Popen[str]:
    command = [
        *(sys.executable, "-m", "locust", "-f", str(REPOSITORY_ROOT / "perf" / "load" / "locustfile.py"), "--headless"),
        *("--run-time", f"{RUN_S}s", "--stop-timeout", "20s", "--max-tokens", "20"),
        *("--grpc-url", server.grpc_url, "--http-url", server.http_url.removeprefix("http://")),
        *("--summary", str(summary), *options),
    ]
    return subprocess.Popen(command, cwd=REPOSITORY_ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def row_of(process: subprocess.Popen[str], summary: Path) -> tuple[int, dict[str, str]]:
    output, _ = process.communicate(timeout=60)
    assert summary.is_file(), output
    with summary.open(newline="") as file:
        (row,) = csv.DictReader(file)
    return process.returncode, row


def test_locust_drives_both_endpoints_in_a_closed_and_an_open_loop(shared: TritonServer, tmp_path: Path) -> None:
    files = [tmp_path / f"{name}.csv" for name in ("closed", "open", "refused")]
    both = ("GrpcStreamUser", "HttpStreamUser")
    runs = [
        locust(shared, files[0], "--users", "4", "--spawn-rate", "4", *both),
        locust(shared, files[1], "--users", "2", "--spawn-rate", "2", "--arrival-rate", "20", *both),
        locust(shared, files[2], "--users", "1", "--fields", '{"top_p": 7}', "GrpcStreamUser"),
    ]
    (code, closed), (open_code, opened), (refused_code, refused) = map(row_of, runs, files)
    assert (code, open_code) == (0, 0)
    assert int(closed["requests"]) > 10
    assert closed["errors"] == opened["errors"] == "0"
    assert 20 < int(opened["requests"]) < 20 * (RUN_S + 2)
    assert 0 < float(closed["time_to_first_token_ms.p50"]) < float(closed["latency_ms.p50"])
    # What the server refuses counts as an error, and locust ends with a code that says so.
    assert refused_code == 1
    assert refused["requests"] == "0"
    assert int(refused["errors"]) > 0
    wait_idle(shared)


def test_a_short_soak_finds_nothing(shared: TritonServer) -> None:
    reports: list[float] = []

    def report(stage: str, share: float) -> None:
        reports.append(share)

    workload = Workload([f"prompt {i}" for i in range(7)], max_tokens=20, policies=("", "random"), cancel_every=4)
    outcome = soak(shared, workload, Plan(4.0, 8, warm_up_s=0.5, interval_s=0.2, limit=0.2), report)
    assert not outcome.failures
    assert reports
    assert outcome.requests["stop"] > 50
    assert outcome.requests["cancelled"] > 10
    assert outcome.tokens > 5 * outcome.requests["stop"]
    assert {row.process for row in outcome.growth} == {"tritonserver", *shared.stub_pids()}


def test_a_soak_stops_at_the_first_errors(shared: TritonServer) -> None:
    workload = Workload(["x"], max_tokens=20, policies=("no-such-policy",))
    outcome = soak(shared, workload, Plan(60.0, 2, warm_up_s=1.0), lambda *_: None)
    assert outcome.seconds < 10
    assert any("no-such-policy" in failure for failure in outcome.failures)
    wait_idle(shared)
