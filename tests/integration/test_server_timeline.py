"""A recording of a real server."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.chrome_trace import checked
from tests.support.commands import run
from tests.support.http_calls import answer, refusal
from tests.support.waiting import wait_idle
from tokenrouter.cli import app
from tokenrouter.metrics_page import Scrape, scrape
from tokenrouter.timeline import chrome
from tokenrouter.timeline.client import record
from tokenrouter.timeline.recording import Recording
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

MODELS = ("small", "large")
SECONDS = 2.0
PROMPT = "a timeline of all that happens"


def asked(server: TritonServer, seed: int) -> dict[str, Any]:
    """A routed response."""
    return answer(
        server, text_input=PROMPT, max_tokens=24, policy="random", seed=seed, return_routing=True, stream=False
    )


def recorded(server: TritonServer) -> tuple[list[Recording], list[dict[str, Any]], Scrape]:
    """Recordings in which a load began and ended, its answers, and what it added to the metrics."""
    for head_start_s in (0.5, 1.0, 2.0):
        wait_idle(server)
        before = scrape(server.metrics_url)
        with ThreadPoolExecutor(9) as pool:
            recording = pool.submit(record, server.grpc_url, head_start_s + SECONDS)
            time.sleep(head_start_s)
            answers = list(pool.map(lambda seed: asked(server, seed), range(8)))
            found = recording.result()
        wait_idle(server)
        trails, began_ns = found[0].trails, max(each.about.began_ns for each in found)
        if len(trails) == 8 and all(began_ns < trail.arrived_ns and trail.ended_ns for trail in trails):
            return found, answers, scrape(server.metrics_url).since(before)
    raise AssertionError("the load was never recorded as a whole")


def test_steps_and_requests_are_those_of_metrics_and_answers(shared: TritonServer) -> None:
    recordings, answers, added = recorded(shared)
    for recording in recordings[1:]:
        model = recording.about.model
        assert len(recording.steps) == added.value("tokenrouter_steps", model=model)
        batches = sum(len(step.members) for step in recording.steps)
        assert batches == added.value("tokenrouter_batch_size_sum", model=model)
        assert sum(s.new_tokens for s in recording.steps) == added.value("tokenrouter_new_tokens", model=model)
    written = sum(tokens for trail in recordings[0].trails for _, tokens in trail.runs)
    assert written == added.value("tokenrouter_tokens", model="tokenrouter") == 8 * 24
    routings = [json.loads(each["routing"]) for each in answers]
    runs = sorted([[run["model"], run["end"] - run["start"]] for run in routing["runs"]] for routing in routings)
    assert sorted([list(map(list, trail.runs)) for trail in recordings[0].trails]) == runs
    events = checked(chrome.document(recordings))
    handed_over = sum(event["ph"] == "s" for event in events)
    assert handed_over == sum(routing["handoffs"] for routing in routings) > 0
    ends = [event["args"]["runs"] for event in events if event["ph"] == "i" and event["cat"] == "end"]
    assert sorted([list(map(list, each)) for each in ends]) == runs


def test_bounds_and_direct_calls(shared: TritonServer, tmp_path: Path) -> None:
    for wrong in (0, -1, 60_001, "x", 1.5, True):
        assert "timeline_ms is" in refusal(shared, text_input="-", timeline_ms=wrong)[1]
    threading.Thread(target=lambda: answer(shared, model="small", text_input=PROMPT, max_tokens=4)).start()
    path = tmp_path / "new" / "trace.json"
    done = run(app, "timeline", "--seconds", 0.2, "--url", shared.grpc_url, "--output", path)
    assert done.exit_code == 0, done.output
    checked(json.loads(path.read_text()))
    no_entry = run(app, "timeline", "--url", shared.grpc_url, "--output", path, "--model", "small")
    assert (no_entry.exit_code, "no entry model" in no_entry.stderr) == (2, True)
