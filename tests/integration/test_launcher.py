"""The launcher and `TritonServer`: what they show, and that nothing stays behind."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.echo import WriteModel, echo
from tests.support.servers import shared_memory
from tests.support.waiting import PATIENCE_S, ended, until
from tools.tritonserver.installation import LaunchError
from tools.tritonserver.log import model_errors
from tools.tritonserver.ports import Ports, free_port
from tools.tritonserver.run_directory import RunDirectory, remove_stale_run_directories
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

PROJECT = Path(__file__).resolve().parents[2]


# Triton counts a model as loaded a moment after `initialize` returns.
_DIES = """
    def die(self):
        import os, pathlib, signal, time

        time.sleep(1)
        pathlib.Path({died!r}).touch()
        os.kill(os.getpid(), signal.SIGKILL)
"""


@contextmanager
def launcher(*arguments: str, home: Path) -> Iterator[subprocess.Popen[str]]:
    """`python -m tools.launch` with its own folder for temporary files; ends it if the test did not."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tools.launch", *arguments],
        cwd=PROJECT,
        env={**os.environ, "TMPDIR": str(home)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=PATIENCE_S)


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder with a short name: pytest's own are too long for sockets."""
    with tempfile.TemporaryDirectory(prefix="tl-") as folder:
        yield Path(folder)


@pytest.fixture
def free_ports() -> list[str]:
    return ["--http-port=0", "--grpc-port=0", "--metrics-port=0", "--supervisor-port=0", "--openai-port=0"]


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """The output up to the line that holds `text`; pytest's time-out bounds the wait."""
    assert process.stdout is not None
    seen = ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
    raise AssertionError(f"{text!r} never came:\n{seen}")


def server_of(process: subprocess.Popen[str]) -> psutil.Process:
    """The tritonserver that a launcher started."""
    found = [child for child in psutil.Process(process.pid).children() if "tritonserver" in child.name()]
    assert len(found) == 1
    return found[0]


def run_dir_in(home: Path) -> Path:
    (found,) = home.glob("tokenrouter-run-*")
    return found


def inherits(process: psutil.Process, home: Path) -> bool:
    """Whether a process comes from the launcher whose folder for temporary files this is."""
    try:
        return process.environ().get("TMPDIR") == str(home)
    except (psutil.Error, OSError):
        return False


class TestServer:
    def test_two_serve_side_by_side_and_each_cleans_up_its_own_only(self, write_model: WriteModel) -> None:
        repository = write_model()
        with TritonServer(repository) as first, TritonServer(repository) as second:
            assert {*vars(first.ports).values()}.isdisjoint(vars(second.ports).values())
            assert [echo(first, "a"), echo(second, "b")] == ["a", "b"]
            assert first.stub_pids().keys() == second.stub_pids().keys() == {"echo"}
            pids = [first.pid, *first.stub_pids().values()]
            folder = first.run_dir
            assert folder.stat().st_mode & 0o777 == 0o700
            assert shared_memory(folder)
            assert first.stop() == 0
            assert all(ended(pid) for pid in pids)
            assert not folder.exists()
            assert shared_memory(folder) == []
            assert echo(second, "still here") == "still here"

    def test_kill_9_of_the_server_leaves_nothing_after_stop(self, write_model: WriteModel) -> None:
        with TritonServer(write_model()) as server:
            stubs, folder = server.stub_pids(), server.run_dir
            os.kill(server.pid, signal.SIGKILL)
            assert server.stop() == -signal.SIGKILL
            assert all(ended(pid) for pid in stubs.values())
            assert shared_memory(folder) == []
            assert not folder.exists()

    def test_models_are_loaded_on_demand_in_explicit_mode(self, write_model: WriteModel) -> None:
        write_model("broken", initialize="raise ValueError('never loaded')")
        arguments = ["--model-control-mode=explicit", "--load-model=echo"]
        with TritonServer(write_model("echo"), extra_args=arguments) as server:
            assert server.loaded_models() == ["echo"]
            assert re.fullmatch(r"\d+\.\d+\.\d+", server.version())

    def test_failing_model_is_named_with_its_own_error(self, write_model: WriteModel) -> None:
        write_model("echo")
        repository = write_model("broken", initialize="raise ValueError('no \"weights\" here')")
        server = TritonServer(repository)
        with pytest.raises(LaunchError, match=r"model 'broken' does not load: .*ValueError: no \"weights\" here"):
            server.start()
        assert not server.run_dir.exists()
        assert shared_memory(server.run_dir) == []

    def test_model_that_does_not_load_in_time(self, write_model: WriteModel) -> None:
        repository = write_model(initialize="import time; time.sleep(600)")
        server = TritonServer(repository, ready_timeout_s=3, exit_timeout_s=0)
        with pytest.raises(LaunchError, match="not ready after 3 s"):
            server.start()
        assert ended(server.pid)
        assert not psutil.pid_exists(server.pid)
        assert shared_memory(server.run_dir) == []

    @pytest.mark.parametrize("name", ["http", "grpc", "metrics"])
    def test_port_in_use(self, write_model: WriteModel, name: str) -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            with pytest.raises(LaunchError, match=rf"port {port} .*make serve {name.upper()}_PORT="):
                TritonServer(write_model(), ports=Ports(**{name: port})).start()


class TestLauncher:
    def test_check_serves_and_stops(self, write_model: WriteModel, free_ports: list[str], home: Path) -> None:
        with launcher("--check", f"--model-repository={write_model()}", *free_ports, home=home) as process:
            output = process.communicate(timeout=2 * PATIENCE_S)[0]
        assert process.returncode == 0, output
        assert "echo loaded after" in output
        assert list(home.iterdir()) == []

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_signal_leaves_nothing(
        self, write_model: WriteModel, free_ports: list[str], home: Path, number: signal.Signals
    ) -> None:
        with launcher(f"--model-repository={write_model()}", *free_ports, home=home) as process:
            read_until(process, "Ctrl-C stops")
            server, folder = server_of(process), run_dir_in(home)
            stubs = server.children()
            assert shared_memory(folder)
            assert stubs
            process.send_signal(number)
            output = process.communicate(timeout=PATIENCE_S)[0]
        assert process.returncode == 0, output
        assert all(ended(child.pid) for child in (server, *stubs))
        assert shared_memory(folder) == []
        assert list(home.iterdir()) == []

    def test_signal_while_loading_leaves_nothing(
        self, write_model: WriteModel, free_ports: list[str], home: Path, tmp_path: Path
    ) -> None:
        began = tmp_path / "began"
        repository = write_model(initialize=f"open({str(began)!r}, 'w'); import time; time.sleep(600)")
        with launcher(f"--model-repository={repository}", "--exit-timeout=1", *free_ports, home=home) as process:
            until(began.exists, what="the model loads")
            server, folder = server_of(process), run_dir_in(home)
            process.terminate()
            process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 130
        assert ended(server.pid)
        assert shared_memory(folder) == []
        assert list(home.iterdir()) == []

    def test_failing_model_ends_it_with_the_error(
        self, write_model: WriteModel, free_ports: list[str], home: Path
    ) -> None:
        repository = write_model("broken", initialize="raise ValueError('no [weights] here')")
        with launcher(f"--model-repository={repository}", *free_ports, home=home) as process:
            output = process.communicate(timeout=2 * PATIENCE_S)[0]
        assert process.returncode == 2
        assert "model 'broken' does not load" in output
        assert "ValueError: no [weights] here" in output
        assert list(home.iterdir()) == []

    def test_gives_up_with_exit_code_1_when_too_much_dies(
        self, write_model: WriteModel, free_ports: list[str], home: Path
    ) -> None:
        arguments = (f"--model-repository={write_model()}", "--restart-limit=1", "--restart-window=600")
        with launcher(*arguments, *free_ports, home=home) as process:
            read_until(process, "Ctrl-C stops")
            server_of(process).kill()
            read_until(process, "tritonserver is back")
            server_of(process).kill()
            output = process.communicate(timeout=PATIENCE_S)[0]
        assert process.returncode == 1
        assert "giving up: 2 events in 600 s, the last: tritonserver ended" in output
        assert list(home.iterdir()) == []

    def test_kill_9_takes_the_server_with_it_and_the_next_start_removes_the_rest(
        self, write_model: WriteModel, free_ports: list[str], home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with launcher(f"--model-repository={write_model()}", *free_ports, home=home) as process:
            read_until(process, "Ctrl-C stops")
            server, folder = server_of(process), run_dir_in(home)
            everybody = [server, *server.children()]
            monkeypatch.setattr(tempfile, "tempdir", str(home))
            assert remove_stale_run_directories() == []
            process.kill()
            until(lambda: all(ended(child.pid) for child in everybody), what="tritonserver and stubs end")
        until(lambda: not any(home.iterdir()) or remove_stale_run_directories(), what="the lock is free")
        assert shared_memory(folder) == []
        assert list(home.iterdir()) == []

    def test_a_model_that_dies_before_it_is_watched_comes_back(
        self, write_model: WriteModel, free_ports: list[str], home: Path, tmp_path: Path
    ) -> None:
        died = tmp_path / "died"
        once = f"import os, threading; os.path.exists({str(died)!r}) or threading.Thread(target=self.die).start()"
        repository = write_model("mortal", initialize=once, methods=_DIES.format(died=str(died)))
        write_model("slow", initialize="import time; time.sleep(3)")
        with launcher(f"--model-repository={repository}", *free_ports, home=home) as process:
            output = read_until(process, "mortal is back")
            process.terminate()
            process.communicate(timeout=PATIENCE_S)
        assert "the process of mortal ended before it was watched" in output
        assert died.exists()
        assert process.returncode == 0

    @pytest.mark.parametrize("seed", range(2))
    @pytest.mark.parametrize("during", ["start", "reload"])
    def test_nothing_outlives_a_tritonserver_that_is_killed_at_any_moment(
        self, write_model: WriteModel, free_ports: list[str], home: Path, seed: int, during: str
    ) -> None:
        moment_s = random.Random(seed).uniform(0.0, 1.0)
        arguments = (f"--model-repository={write_model()}", f"--restart-limit={int(during == 'reload')}")
        with launcher(*arguments, *free_ports, home=home) as process:
            if during == "reload":
                read_until(process, "Ctrl-C stops")
                server_of(process).children()[0].kill()
                read_until(process, "echo ended")
            until(lambda: psutil.Process(process.pid).children(), what="tritonserver runs")
            time.sleep(moment_s)
            server_of(process).kill()
            process.communicate(timeout=PATIENCE_S)
        assert process.returncode in (1, 2)  # it had served, or had not
        assert list(home.iterdir()) == []
        assert not list(Path("/dev/shm").glob(f"tokenrouter-run-{process.pid}-*"))
        assert [each.pid for each in psutil.process_iter() if inherits(each, home)] == []

    def test_arguments_after_two_dashes_reach_triton(
        self, write_model: WriteModel, free_ports: list[str], home: Path
    ) -> None:
        with launcher(
            f"--model-repository={write_model()}", *free_ports, "--", "--no-such-option=1", home=home
        ) as process:
            output = process.communicate(timeout=PATIENCE_S)[0]
        assert process.returncode == 2
        assert "no-such-option" in output


class TestParts:
    def test_folder_for_temporary_files_with_a_long_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        long = tmp_path / ("x" * 100)
        long.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(long))
        with pytest.raises(LaunchError, match="set TMPDIR to a folder"):
            RunDirectory.create()
        assert list(long.iterdir()) == []

    def test_stale_means_unlocked_and_ours(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(home))
        alive, killed = RunDirectory.create(), RunDirectory.create()
        (home / "tokenrouter-run-without-lock").mkdir()
        region = Path("/dev/shm") / f"{killed.memory_prefix}test"
        region.touch()
        os.close(killed.lock)
        assert remove_stale_run_directories() == [killed.path]
        assert alive.path.is_dir()
        assert not region.exists()
        alive.remove()
        alive.remove()
        assert [path.name for path in home.iterdir()] == ["tokenrouter-run-without-lock"]

    def test_free_ports_are_outside_the_range_of_outgoing_connections(self) -> None:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        assert free_port() < first

    @pytest.mark.parametrize(
        ("log", "model", "reason"),
        [
            pytest.param(
                "E1 be.cc:642] \"failed to load 'a' version 1: Internal: ValueError: x" r'\n\nAt:\n  f(1)\n"',
                "a",
                "Internal: ValueError: x\n\nAt:\n  f(1)",
                id="exception",
            ),
            pytest.param(
                "E1 model_repository_manager.cc:1] \"Poll failed for model directory 'a': unexpected platform\"",
                "a",
                "unexpected platform",
                id="config",
            ),
        ],
    )
    def test_error_of_a_model_in_the_log(self, log: str, model: str, reason: str) -> None:
        assert model_errors(f"I1 first line\n{log}\nlast line") == {model: reason}
