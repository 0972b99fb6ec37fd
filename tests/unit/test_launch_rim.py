"""The launcher's parts that touch processes, sockets and files, without a tritonserver."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.error import HTTPError

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.waiting import until
from tokenrouter.direct_http import http_open
from tools.launch.decisions import FRONT, SERVER, Component, Condition, Phase, Status
from tools.launch.follower import LogFollower
from tools.launch.health import Health, answer
from tools.launch.watch import Death, Watch
from tools.tritonserver.connections import cut_clients
from tools.tritonserver.ports import free_port
from tools.tritonserver.processes import Processes, catches, model_of

UP = Component(Condition.UP, 10.0)
SERVING = Status(Phase.SERVING, "", {SERVER: UP, FRONT: UP, "small": UP, "large": UP}, {}, {})
AWAY = {**SERVING.components, "large": Component(Condition.RELOADING, 12.0)}
LOADING = Status(Phase.SERVING, "", AWAY, {"large": 2}, {"large": 4.5})
RESTARTING = Status(Phase.RESTARTING, "tritonserver ended", LOADING.components, {SERVER: 1}, {})
REPLACED = Status(
    Phase.SERVING,
    "",
    {**AWAY, "large_1": UP, "large_2": Component(Condition.AWAY, 11.0)},
    {"large": 2},
    {},
    [("small",), ("large", "large_1", "large_2")],
)
GIVEN_UP = Status(Phase.GIVEN_UP, "6 events in 60 s", {}, {}, {})


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen(["sleep", "60"])


class TestWatch:
    def test_tells_each_death_once_and_of_nobody_else(self) -> None:
        watch, first, second = Watch(), sleeper(), sleeper()
        try:
            watch.add("first", first.pid)
            watch.add("second", second.pid)
            assert watch.wait(0.0) == []
            first.kill()  # and nobody reaps it: it is not always our own child
            assert watch.wait(30.0) == [Death("first", first.pid)]
            assert watch.pid("first") is None
            assert watch.pid("second") == second.pid
            assert watch.wait(0.0) == []
        finally:
            for process in (first, second):
                process.kill()
                process.wait()

    def test_a_process_that_is_gone_already_is_told_too(self) -> None:
        watch, process = Watch(), sleeper()
        process.kill()
        process.wait()
        watch.add("gone", process.pid)
        assert watch.wait(30.0) == [Death("gone", process.pid)]

    def test_somebody_new_takes_the_place_of_the_old_one(self) -> None:
        watch, old, new = Watch(), sleeper(), sleeper()
        try:
            watch.add("model", old.pid)
            watch.add("model", new.pid)
            old.kill()
            assert watch.wait(0.2) == []
            watch.keep("other")
            new.kill()
            assert watch.wait(0.2) == []
        finally:
            for process in (old, new):
                process.kill()
                process.wait()

    def test_wakes_from_another_thread(self) -> None:
        watch = Watch()
        threading.Timer(0.05, watch.wake).start()
        assert watch.wait(30.0) == []
        watch.wake()
        watch.wake()
        assert watch.wait(30.0) == []


class TestHealth:
    @pytest.mark.parametrize(
        ("status", "path", "code", "told"),
        [
            pytest.param(SERVING, "/healthz", 200, {"healthy": True, "state": "serving"}, id="alive"),
            pytest.param(RESTARTING, "/healthz", 200, {"reason": "tritonserver ended"}, id="alive-and-busy"),
            pytest.param(GIVEN_UP, "/healthz", 503, {"healthy": False}, id="given-up"),
            pytest.param(SERVING, "/readyz", 200, {"ready": True, "restarting": []}, id="ready"),
            pytest.param(LOADING, "/readyz", 503, {"ready": False, "restarting": ["large"]}, id="one-is-away"),
            pytest.param(REPLACED, "/readyz", 200, {"restarting": ["large"], "away": ["large_2"]}, id="replicas-serve"),
            pytest.param(REPLACED, "/readyz/large", 503, {"state": "reloading"}, id="replica-is-loaded"),
            pytest.param(REPLACED, "/readyz/large_2", 503, {"state": "away"}, id="replica-is-not-connected"),
            pytest.param(REPLACED, "/readyz/large_1", 200, {"ready": True}, id="replica"),
            pytest.param(SERVING, "/readyz/small", 200, {"ready": True, "model": "small"}, id="model"),
            pytest.param(LOADING, "/readyz/small", 200, {"ready": True}, id="the-others-serve"),
            pytest.param(LOADING, "/readyz/large", 503, {"state": "reloading", "seconds": 3.0}, id="model-away"),
            pytest.param(RESTARTING, "/readyz/small", 503, {"reason": "tritonserver ended"}, id="nobody-serves"),
            pytest.param(SERVING, "/readyz/none", 404, {"state": "serving"}, id="unknown"),
            pytest.param(SERVING, "/", 404, {}, id="elsewhere"),
        ],
    )  # fmt: skip
    def test_says_what_is_the_case(self, status: Status, path: str, code: int, told: dict[str, object]) -> None:
        found, body = answer(path, status, now_s=15.0)
        assert found == code
        assert told.items() <= body.items()

    def test_over_http(self) -> None:
        port = free_port()
        with closing(Health("127.0.0.1", port, LOADING)) as health:
            with pytest.raises(HTTPError) as refused:
                http_open(f"{health.url}/readyz", timeout=10)
            assert refused.value.code == 503
            with refused.value:
                assert json.load(refused.value)["restarting"] == ["large"]
            health.publish(SERVING)
            with http_open(f"{health.url}/readyz", timeout=10) as response:
                assert json.load(response)["ready"] is True

    def test_metrics(self) -> None:
        with (
            closing(Health("127.0.0.1", free_port(), LOADING)) as health,
            http_open(f"{health.url}/metrics", timeout=10) as response,
        ):
            page = response.read().decode()
        values = {
            (sample.name, sample.labels["model"]): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }
        assert values["tokenrouter_restarts_total", "large"] == 2
        assert values["tokenrouter_restarts_total", "small"] == 0
        assert values["tokenrouter_up", "large"] == 0
        assert values["tokenrouter_up", "small"] == 1
        assert values["tokenrouter_recovery_seconds", "large"] == 4.5


_ACCEPTS = """
import socket, sys
listener = socket.create_server(("127.0.0.1", 0))
other = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], other.getsockname()[1], flush=True)
connections = [listener.accept(), listener.accept(), other.accept()]
print("accepted", flush=True)
sys.stdin.read()
"""


def test_clients_are_cut_off_on_the_named_ports_only() -> None:
    command = [sys.executable, "-c", _ACCEPTS]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        ports = [int(word) for word in process.stdout.readline().split()]
        clients = [socket.create_connection(("127.0.0.1", ports[i]), timeout=30) for i in (0, 0, 1)]
        assert process.stdout.readline() == "accepted\n"
        assert cut_clients(process.pid, ports[:1]) == 2
        assert [client.recv(1) for client in clients[:2]] == [b"", b""]
        clients[2].settimeout(0.2)
        with pytest.raises(TimeoutError):
            clients[2].recv(1)
        with socket.create_connection(("127.0.0.1", ports[0]), timeout=30):  # it still listens
            pass
        for client in clients:
            client.close()


def test_follower_copies_what_is_new_to_the_end_of_a_removed_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, follower = tmp_path / "log", LogFollower()
    log.write_text("before\n")
    follower.follow(log, whole=False)
    with log.open("a") as file:
        file.write("one\n")
    follower.pump()
    assert capsys.readouterr().out == "one\n"
    with log.open("a") as file:
        file.write("two\n")
    log.unlink()
    log.write_text("new\n")
    follower.follow(log, whole=True)
    follower.close()
    assert capsys.readouterr().out == "two\n" + "new\n"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """A server whose child has a child of its own, which is orphaned at once."""
    script = "(sleep 60 & sleep 60 & wait) & (setsid sleep 60 & ) ; exec sleep 60"
    mark = f"TOKENROUTER_TEST_{os.getpid()}"
    keep = os.open("/dev/null", os.O_RDONLY)
    with (tmp_path / "log").open("wb") as log:
        started = Processes(["sh", "-c", script], {**os.environ, mark: str(tmp_path)}, log, keep, mark=mark)
    try:
        yield started
    finally:
        started.end(0.0)
        os.close(keep)


def sleepers(value: Path) -> int:
    """Programs `sleep` that have this value in their environment."""
    found = 0
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command, environment = (path / "cmdline").read_bytes(), (path / "environ").read_bytes()
            found += command.startswith(b"sleep") and os.fsencode(value) in environment
    return found


def wait_for(number: int, value: Path) -> None:
    end = time.monotonic() + 30
    while sleepers(value) != number:
        assert time.monotonic() < end, sleepers(value)
        time.sleep(0.01)


def test_processes_are_found_by_what_they_inherit(processes: Processes, tmp_path: Path) -> None:
    wait_for(4, tmp_path)
    processes.kill_orphans()
    wait_for(3, tmp_path)
    assert processes.is_running()
    assert processes.end(30.0) == -signal.SIGTERM
    assert sleepers(tmp_path) == 0


@pytest.mark.parametrize(("hangs", "code"), [(True, 0), (False, -signal.SIGKILL)])
def test_a_server_that_may_wait_for_ever_is_ended_when_no_response_is_left(
    tmp_path: Path, hangs: bool, code: int
) -> None:
    model = tmp_path / "small" / "1" / "model.py"
    model.parent.mkdir(parents=True)
    model.write_text("import time; time.sleep(60)")
    script = f"trap '' TERM; {sys.executable} {model} & wait; sleep 60"
    mark = f"TOKENROUTER_TEST_{os.getpid()}"
    with (tmp_path / "log").open("wb") as log, open("/dev/null", "rb") as keep:
        started = Processes(["sh", "-c", script], {**os.environ, mark: str(tmp_path)}, log, keep.fileno(), mark=mark)
        stubs = until(started.stubs, what="the model's process")
        assert started.end(3.0, hangs=hangs, cut_after_s=0.0) == code
    assert model_of(stubs["small"]) is None


def test_a_signal_goes_only_to_who_has_a_handler_for_it() -> None:
    process = sleeper()
    try:
        assert not catches(process.pid, signal.SIGUSR1)
    finally:
        process.kill()
        process.wait()
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        assert catches(os.getpid(), signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
