"""The carrier of one host: its sockets' files, and who may use them."""

from __future__ import annotations

import os
import socket
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.channel import PATIENCE_S, End, until
from tokenrouter.channel.framing import frame
from tokenrouter.channel.unix import UnixCarrier, runtime_dir, socket_path
from tokenrouter.errors import ConfigError


@pytest.fixture
def path() -> Iterator[Path]:
    """Short, because a socket's path may have only about 100 characters."""
    with tempfile.TemporaryDirectory(prefix="tr-") as folder:
        yield Path(folder) / "sockets" / "small.sock"


@pytest.fixture
def ends() -> Iterator[Callable[..., End]]:
    opened: list[UnixCarrier] = []

    def open_end(**options: object) -> End:
        for value in options.values():
            if isinstance(value, Path):
                value.parent.mkdir(mode=0o700, exist_ok=True)
        opened.append(UnixCarrier(**options))  # type: ignore[arg-type]
        return End(opened[-1])

    yield open_end
    for carrier in opened:
        if carrier._selector.get_map() is not None:
            carrier.close()


def test_the_socket_file_of_a_process_that_was_killed_is_replaced(path: Path, ends: Callable[..., End]) -> None:
    path.parent.mkdir(mode=0o700)
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dead.bind(str(path))
    dead.close()
    assert path.exists()
    server, client = ends(listen=path), ends(dial={"small": path})
    until(lambda: bool(server.peers and client.peers), server, client, why="connected")


def test_a_socket_that_another_process_uses_is_left_alone(path: Path, ends: Callable[..., End]) -> None:
    first, client = ends(listen=path), ends(dial={"small": path})
    with pytest.raises(ConfigError, match=r"in use by another process.*TOKENROUTER_RUNTIME_DIR"):
        UnixCarrier(listen=path)
    until(lambda: bool(first.peers and client.peers), first, client, why="the first one still serves")


def test_who_is_patient_follows_a_predecessor_that_goes(path: Path, ends: Callable[..., End]) -> None:
    """As a model that is loaded again while Triton still ends its old process."""
    first = ends(listen=path)
    leaving = threading.Timer(0.3, first.carrier.close)
    leaving.start()
    second = ends(listen=path, patience_s=PATIENCE_S)
    leaving.join()
    client = ends(dial={"small": path})
    until(lambda: bool(second.peers and client.peers), second, client, why="the second one serves")
    assert path.exists()


def test_a_path_that_is_too_long_is_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"cannot listen on .*set TOKENROUTER_RUNTIME_DIR to a shorter path"):
        UnixCarrier(listen=folder / "small.sock")


def test_closing_removes_the_socket_and_its_directory_once_empty(path: Path, ends: Callable[..., End]) -> None:
    first, second = ends(listen=path), ends(listen=path.with_name("large.sock"))
    first.carrier.close()
    assert not path.exists()
    assert path.parent.exists()
    second.carrier.close()
    assert not path.parent.exists()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"\xff\xff\xff\xff", id="oversized-announcement"),
        pytest.param(frame(b"whole") + b"\x05\x00\x00\x00ab", id="ends-inside-a-frame"),
    ],
)
def test_a_peer_that_breaks_the_framing_is_dropped(path: Path, ends: Callable[..., End], data: bytes) -> None:
    server = ends(listen=path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.connect(str(path))
        peer.sendall(data)
        peer.shutdown(socket.SHUT_WR)
        until(lambda: bool(server.lost), server, why="dropped")
    assert server.payloads in ([], [b"whole"])


def test_a_wake_after_closing_touches_no_file_that_took_the_number(path: Path, ends: Callable[..., End]) -> None:
    server = ends(listen=path)
    server.carrier.close()
    taken = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(20)]
    try:
        server.carrier.wake()
        for fd in taken:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(fd)
    finally:
        for fd in taken:
            os.close(fd)


def test_only_the_owner_can_reach_the_sockets(
    path: Path, ends: Callable[..., End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENROUTER_RUNTIME_DIR", str(path.parent))
    directory = runtime_dir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    ends(listen=socket_path(directory, "small"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert runtime_dir() == directory


def test_a_directory_that_is_open_to_others_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENROUTER_RUNTIME_DIR", str(path.parent))
    path.parent.mkdir()
    path.parent.chmod(0o755)
    with pytest.raises(ConfigError, match="must belong to this user and have mode 0700"):
        runtime_dir()
