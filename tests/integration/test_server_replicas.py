"""Two replicas of each model behind one entry model, beside another one that knows one replica of each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.deaths import kill_model
from tests.support.grpc_calls import GrpcStream, Message
from tests.support.http_calls import answer
from tests.support.repositories import emulated_spec, write_emulated
from tests.support.waiting import until
from tests.support.watch import WATCH
from tokenrouter.metrics_page import Scrape, scrape
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

OPTIONS = {"step_ms": 2.0, "margin": 2.0, "max_seq_len": 16_384, "kv_cache_config": {"max_tokens": 200_000}}
REPLICAS = {"small": {"replicas": 2}, "large": {"replicas": 2}}
# The noise decides among tokens, and chance decides who writes.
DRAWN = {"policy": "random", "policy_params": json.dumps({"p": 0.5}), "temperature": 3.0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("replicas") / "repository"
    for name, per_model in (("one", {}), ("tokenrouter", REPLICAS)):
        entry = {"name": name, "aliases": {}}
        write_emulated(repository, emulated_spec(entry=entry, options=OPTIONS, per_model=per_model))
    # A model's process is killed here and stays away: only tritonserver's own has to live.
    with WATCH.over(TritonServer(Path(repository), exit_timeout_s=4), models=False) as running:
        yield running


def bodies(count: int, tokens: int) -> dict[str, dict[str, Any]]:
    return {
        f"{seed}": {
            "text_input": f"request {seed} ",
            "max_tokens": tokens,
            "min_tokens": tokens,
            "seed": seed,
            "stream": True,
            **DRAWN,
        }
        for seed in range(count)
    }


def ids(messages: list[Message]) -> list[int]:
    assert not any(message.error for message in messages), messages
    return [token for message in messages for token in message.ids]


def pinned(page: Scrape, name: str) -> float:
    return page.value("tokenrouter_pinned", model="tokenrouter", subserver=name)


def test_tokens_are_those_of_one_replica_also_if_one_is_killed(server: TritonServer) -> None:
    assert {"small", "small_1", "large", "large_1"} <= set(server.stub_pids())
    requests = bodies(8, 400)
    with GrpcStream(server) as call:
        for name, body in requests.items():
            call.send(body, model="one", request_id=name)
        expected = {name: ids(call.wait(name)) for name in requests}
    assert len(set(map(tuple, expected.values()))) == len(requests)
    with GrpcStream(server) as call:
        for name, body in requests.items():
            call.send(body, request_id=name)
        until(lambda: all(call.of(name) for name in requests), what="eight streams")
        page = until(lambda: (page := scrape(server.metrics_url)) and pinned(page, "large_1") == 4 and page)
        assert [pinned(page, name) for name in ("small", "small_1", "large")] == [4, 4, 4]
        kill_model(server.stub_pids()["large_1"], "large_1", server.metrics_url)
        found = {name: ids(call.wait(name)) for name in requests}
    assert found == expected
    page = until(lambda: (page := scrape(server.metrics_url)) and pinned(page, "small") == 0 and page)
    assert page.value("tokenrouter_moved", model="tokenrouter") == 4
    assert page.value("tokenrouter_moved", model="one") == 0
    connected = {
        name: page.value("tokenrouter_connected", model="tokenrouter", subserver=name)
        for name in ("small", "small_1", "large", "large_1")
    }
    assert connected == {"small": 1, "small_1": 1, "large": 1, "large_1": 0}
    assert page.value("tokenrouter_connected", model="tokenrouter", replica_of="small") == 2
    # Both have worked: every model publishes the series of its own replica.
    assert all(page.value("tokenrouter_visits", model=name) > 0 for name in connected)


def test_a_replica_is_called_directly_like_any_model(server: TritonServer) -> None:
    assert answer(server, model="small_1", text_input="hello", max_tokens=5)["text_output"] == "hellohello"
