"""Dashboard and alerts, with Debian's Prometheus while it scrapes a real server under load."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import run
from tests.support.http_calls import generate
from tests.support.repositories import byte_tokenizer, emulated_spec, write_emulated
from tests.support.supervised import Supervised, supervised
from tests.support.waiting import until
from tokenrouter.direct_http import http_open, is_ok
from tools import dashboard
from tools.tritonserver.ports import free_port

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed: make system-packages"),
]

MONITORING = Path(__file__).resolve().parents[2] / "configs" / "monitoring"
RATE_INTERVAL = "10s"


def test_every_alert_fires() -> None:
    for arguments in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(["promtool", *arguments], cwd=MONITORING, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    alerts = {
        line.split("alert: ")[1] for line in (MONITORING / "alerts.yml").read_text().splitlines() if "alert: " in line
    }
    fired = (MONITORING / "alerts_test.yml").read_text("utf-8")
    assert len(alerts) >= 9
    assert all(f"alertname: {alert}\n" in fired for alert in alerts)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    """A launcher over emulated models with a table of thresholds, of which the small one goes ahead."""
    repository = tmp_path_factory.mktemp("monitored") / "repository"
    batching = {"batch_thresholds": {2: 1, 4: 2}, "max_queue_delay_microseconds": 5000}
    params = {"writers": ["small", "large"], "trigger": "first"}
    entry = {"policy": "scripted", "policy_params": params, "speculation": {"depth": 4}}
    options = {"step_ms": 2.0, "max_seq_len": 4096}
    spec = emulated_spec(entry=entry, options=options, model={"batching": batching})
    write_emulated(repository, spec, byte_tokenizer())
    with supervised(repository) as running:
        yield running


@contextmanager
def load(server: Supervised) -> Iterator[None]:
    """Requests, some of them refused, until the end."""
    over = threading.Event()

    def client(number: int) -> None:
        while not over.is_set():
            generate(server, {"text_input": f"request {number}", "max_tokens": 32})
            generate(server, {"text_input": "refused", "max_tokens": 0})

    threads = [threading.Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextmanager
def prometheus(folder: Path, **pages: str) -> Iterator[str]:
    """Base URL of a Prometheus that scrapes the pages of the project's own configuration, found elsewhere."""
    text = (MONITORING / "prometheus.yml").read_text("utf-8")
    for name, found in pages.items():
        text = text.replace(name, found)
    text = text.replace("scrape_interval: 5s", "scrape_interval: 1s")
    text = text.replace("evaluation_interval: 15s", "evaluation_interval: 1s")
    (folder / "prometheus.yml").write_text(text.replace("alerts.yml", str(MONITORING / "alerts.yml")))
    port = free_port()
    command = ["prometheus", "--config.file=prometheus.yml", f"--web.listen-address=127.0.0.1:{port}"]
    process = subprocess.Popen([*command, "--storage.tsdb.path=data", "--log.level=error"], cwd=folder)
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: is_ok(f"{url}/-/ready", 5.0), what="Prometheus is ready")
        yield url
    finally:
        process.terminate()
        process.wait()


def test_every_query_of_the_dashboard_has_data(server: Supervised, tmp_path: Path) -> None:
    pages = {
        "tokenrouter:8002": f"127.0.0.1:{server.ports.metrics}",
        "tokenrouter:8003": f"127.0.0.1:{server.supervisor}",
    }
    wanted = [target for panel in dashboard.panels() for target in dashboard.targets(panel, RATE_INTERVAL)]
    with prometheus(tmp_path, **pages) as url, load(server):
        for target in wanted:
            until(lambda target=target: any(line.values for line in lines(url, target)), what=target.expr)
        named = {line.name for target in wanted for line in lines(url, target)}
        picture = tmp_path / "dashboard.png"
        assert run(dashboard.main, "--prometheus", url, "--output", picture, "--minutes", 1).exit_code == 0
        until(lambda: {rule["health"] for rule in rules(url)} == {"ok"}, what="every rule was evaluated")
    assert picture.stat().st_size > 10_000
    assert {"scripted: moving average", "scripted: confirmed"} <= named
    assert {"scripted: small", "large: threshold", "small from 4", "invalid_request", "p99", "openai"} <= named


def rules(url: str) -> list[dict[str, Any]]:
    with http_open(f"{url}/api/v1/rules", timeout=30) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["groups"][0]["rules"]
    return found


def lines(url: str, target: dashboard.Target) -> list[dashboard.Line]:
    return dashboard.lines(url, target, minutes=0.2)


def test_the_picture_without_a_prometheus() -> None:
    refused = run(dashboard.main, "--prometheus", "http://127.0.0.1:1")
    assert (refused.exit_code, "--prometheus names it" in refused.stderr) == (2, True)
