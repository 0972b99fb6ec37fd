"""What the launcher does about the death of its processes, and what it keeps closed. One launcher for all tests."""

from __future__ import annotations

import http.client
import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.error import HTTPError
from urllib.request import Request

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from tests.support.deaths import kill_model
from tests.support.grpc_calls import GrpcStream
from tests.support.http_calls import HttpStream, answer
from tests.support.repositories import emulated_spec, write_emulated
from tests.support.supervised import Supervised, supervised
from tests.support.waiting import PATIENCE_S, ended, until
from tokenrouter.direct_http import http_open
from tools.tritonserver.repository_api import HEADER

pytestmark = pytest.mark.integration

KEY = "a-key-of-this-test"
HANGS = "tests.support.faults:HangsAt"
OPTIONS = {"step_ms": 2.0, "max_seq_len": 16_384, "kv_cache_config": {"max_tokens": 200_000}}
PROMPT = "secret-of-a-client "
EXIT_TIMEOUT_S = 2


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Supervised]:
    repository = tmp_path_factory.mktemp("supervised") / "repository"
    entry = {"selectable_policies": ["scripted", "single", HANGS], "connect_timeout_ms": 120_000}
    write_emulated(repository, emulated_spec(entry=entry, options=OPTIONS))
    arguments = ("--restart-limit=100", f"--exit-timeout={EXIT_TIMEOUT_S}")
    env = {"TOKENROUTER_HANG_TIMEOUT_S": "3", "TOKENROUTER_ADMIN_KEY": KEY}
    with supervised(repository, *arguments, env=env) as running:
        yield running


def long_request(letter: str, tokens: int = 900) -> dict[str, object]:
    return {"text_input": PROMPT + letter * (tokens - len(PROMPT)), "max_tokens": tokens, "stream": True}


def test_running_requests_outlive_the_death_of_a_subserver(launcher: Supervised) -> None:
    with GrpcStream(launcher) as call:
        for i in range(4):
            call.send(long_request(f"{i}"), request_id=f"{i}")
        until(lambda: all(call.of(f"{i}") for i in range(4)), what="four streams")
        launcher.kill("small")
        answers = ["".join(message.text for message in call.wait(f"{i}")) for i in range(4)]
    assert answers == [str(long_request(f"{i}")["text_input"]) for i in range(4)]
    output = launcher.output()
    assert "the process of small (" in output
    assert "supervisor: small is back after" in output


def test_health_names_who_is_away(launcher: Supervised) -> None:
    pid = launcher.pids()["large"]
    kill_model(pid, "large", launcher.metrics_url)
    _, told = until(lambda: (away := launcher.health("/readyz"))[0] == 503 and away, what="not ready")
    assert told["restarting"] == ["large"]
    assert launcher.health("/readyz/large")[0] == 503
    assert launcher.health("/readyz/small")[0] == 200
    assert launcher.health("/healthz")[0] == 200
    until(launcher.ready, what="large is back")
    assert launcher.pids()["large"] != pid
    assert launcher.health("/readyz/none")[0] == 404
    with http_open(f"http://127.0.0.1:{launcher.supervisor}/metrics", timeout=PATIENCE_S) as response:
        families = list(text_string_to_metric_families(response.read().decode()))
    (restarts,) = (family for family in families if family.name == "tokenrouter_restarts")
    assert {sample.labels["model"] for sample in restarts.samples} == {
        "small", "large", "tokenrouter", "tritonserver", "openai"
    }  # fmt: skip
    assert next(sample.value for sample in restarts.samples if sample.labels["model"] == "large") >= 1


def test_clients_of_a_dead_entry_model_are_told_at_once_and_the_next_one_is_served(launcher: Supervised) -> None:
    pids = launcher.pids()
    with HttpStream(launcher, long_request("x", 6000)) as stream, ThreadPoolExecutor(1) as pool:
        next(iter(stream))
        waiting = pool.submit(stream.response.read)  # unlike iteration, it raises for a body that is cut short
        launcher.kill("tokenrouter")
        with pytest.raises((http.client.HTTPException, OSError)):
            waiting.result(PATIENCE_S)
    assert answer(launcher, text_input="hello", max_tokens=5)["text_output"] == "hellohello"
    now = launcher.pids()
    assert {name for name in pids if pids[name] != now[name]} == {"tokenrouter"}


def test_tritonserver_is_started_again_with_everything(launcher: Supervised) -> None:
    pids = launcher.pids()
    launcher.kill("tritonserver")
    assert answer(launcher, text_input="hello", max_tokens=5)["text_output"] == "hellohello"
    now = launcher.pids()
    assert {name for name in pids if pids[name] == now[name]} == {"openai"}
    assert all(ended(pid) for name, pid in pids.items() if name != "openai")


def test_the_openai_server_is_started_again(launcher: Supervised) -> None:
    launcher.kill("openai")
    with http_open(f"http://127.0.0.1:{launcher.openai}/v1/models", timeout=PATIENCE_S) as response:
        assert json.load(response)["data"]


def test_a_hung_loop_is_ended_with_its_stacks_in_the_log(launcher: Supervised) -> None:
    before = launcher.health("/readyz")[1]["restarts"]
    fields = {"text_input": "hang", "max_tokens": 100, "policy": HANGS, "policy_params": '{"position": 1}'}
    with HttpStream(launcher, {**fields, "stream": True}):
        until(lambda: launcher.health("/readyz")[1]["restarts"] != before, what="a model is loaded again")
        # The client leaves, or the request would be sent again and hang the next process.
    until(lambda: "has worked on one thing for 3 s; the stacks of all threads:" in launcher.output(), what="stacks")
    until(launcher.ready, within_s=3 * PATIENCE_S, what="it is back")
    text = launcher.output()
    assert "faults.py" in text[text.index("has worked on one thing") :]
    assert answer(launcher, text_input="hello", max_tokens=5)["text_output"] == "hellohello"


def test_usr1_prints_the_stacks_of_every_process_and_ends_none(launcher: Supervised) -> None:
    pids, seen = launcher.pids(), len(launcher.output())
    launcher.process.send_signal(signal.SIGUSR1)
    wanted = ("supervisor.py", "orchestrating.py", "decoding.py", "responder.py", "publisher.py")
    until(lambda: all(name in launcher.output()[seen:] for name in wanted), what="stacks of launcher and models")
    until(lambda: launcher.output()[seen:].count("pulse.py") >= 5, what="stacks of three models")
    assert launcher.pids() == pids


def test_regions_are_private_from_the_start_and_after_reloads(launcher: Supervised) -> None:
    regions = launcher.regions()
    assert regions
    assert {region.stat().st_mode & 0o777 for region in regions} == {0o600}


@pytest.mark.parametrize("path", ["repository/index", "repository/models/small/unload", "systemsharedmemory/status",
                                  "trace/setting", "logging"])  # fmt: skip
def test_restricted_apis_are_closed_to_clients(launcher: Supervised, path: str) -> None:
    url = f"{launcher.http_url}/v2/{path}"
    body = b"{}" if path.startswith("repository") else None
    with pytest.raises(HTTPError) as refused:
        http_open(Request(url, body), timeout=PATIENCE_S)
    refused.value.close()
    assert refused.value.code == 403
    if "unload" not in path:
        http_open(Request(url, body, {HEADER: KEY}), timeout=PATIENCE_S).close()


def test_restricted_protocols_are_closed_over_grpc(launcher: Supervised) -> None:
    with grpc.insecure_channel(launcher.grpc_url) as channel:
        stub = GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), timeout=PATIENCE_S)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        metadata = ((f"triton-grpc-protocol-{HEADER}", KEY),)
        index = stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), metadata=metadata, timeout=PATIENCE_S)
    assert {model.name for model in index.models} >= {"small", "large", "tokenrouter"}


def test_a_model_that_the_key_unloads_stays_away_until_it_is_loaded(launcher: Supervised) -> None:
    def call(action: str) -> None:
        request = Request(f"{launcher.http_url}/v2/repository/models/large/{action}", b"{}", {HEADER: KEY})
        http_open(request, timeout=PATIENCE_S).close()

    before = launcher.health("/readyz")[1]["restarts"]
    call("unload")
    until(lambda: launcher.health("/readyz/large")[1]["state"] == "unloaded", what="it is unloaded")
    call("load")
    until(lambda: launcher.health("/readyz/large")[0] == 200, what="it is loaded")
    assert launcher.health("/readyz")[1]["restarts"] == before


def test_an_orderly_end_leaves_nothing_and_no_response_that_looks_complete(launcher: Supervised) -> None:
    """Last: it ends the launcher, after all that has happened to it."""
    pids = launcher.pids()
    idle = http.client.HTTPConnection(launcher.http_url.removeprefix("http://"), timeout=PATIENCE_S)
    idle.request("GET", "/v2/health/live")
    assert idle.getresponse().read() == b""  # and stays open, as clients' pools do
    with HttpStream(launcher, long_request("z", 7000)) as stream:
        events = iter(stream)
        seen = [next(events)]
        launcher.process.terminate()
        began = time.monotonic()
        seen += events
        took = time.monotonic() - began
    assert "the server is stopping" in seen[-1]["error"]
    assert not any("finish_reason" in event for event in seen)
    assert took >= EXIT_TIMEOUT_S - 1
    assert launcher.process.wait(2 * PATIENCE_S) == 0, launcher.output()[-3000:]
    idle.close()
    assert all(map(ended, pids.values()))
    assert launcher.regions() == []
    assert [path.name for path in launcher.home.iterdir()] == ["output"]
    output = launcher.output()
    assert "Segmentation fault" not in output
    assert PROMPT.strip() not in output
