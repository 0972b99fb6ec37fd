from __future__ import annotations

import os
import random
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tokenrouter.channel.carrier import Connected, Disconnected, Received
from tokenrouter.channel.framing import frame
from tokenrouter.channel.unix import UnixCarrier, runtime_dir, socket_path
from tokenrouter.errors import ConfigError

PATIENCE_S = 20.0


@pytest.fixture
def path() -> Iterator[Path]:
    """Short, because a socket's path may have only about 100 characters."""
    with tempfile.TemporaryDirectory(prefix="tr-") as folder:
        yield Path(folder) / "sockets" / "small.sock"


class End:
    """One side: a carrier and everything that it reported."""

    def __init__(self, carrier: UnixCarrier) -> None:
        self.carrier = carrier
        self.events: list[Connected | Received | Disconnected] = []

    def poll(self, timeout_s: float = 0.0) -> None:
        self.events += self.carrier.poll(timeout_s)

    @property
    def peers(self) -> list[int]:
        return [event.peer for event in self.events if isinstance(event, Connected)]

    @property
    def payloads(self) -> list[bytes]:
        return [event.payload for event in self.events if isinstance(event, Received)]

    @property
    def lost(self) -> list[int]:
        return [event.peer for event in self.events if isinstance(event, Disconnected)]


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


def until(condition: Callable[[], bool], *ends: End, why: str) -> None:
    """Polls all ends until the condition holds."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S:g} s: {why}"
        for end in ends:
            end.poll(0.01)


def test_frames_go_both_ways_in_order(path: Path, ends: Callable[..., End]) -> None:
    server, client = ends(listen=path), ends(dial={"small": path})
    until(lambda: bool(server.peers and client.peers), server, client, why="connected")
    assert client.events == [Connected(client.peers[0], "small")]
    assert server.events == [Connected(server.peers[0], "")]
    for i in range(50):
        client.carrier.send(client.peers[0], b"%d" % i)
        server.carrier.send(server.peers[0], b"answer %d" % i)
    until(lambda: len(server.payloads) == len(client.payloads) == 50, server, client, why="all frames")
    assert server.payloads == [b"%d" % i for i in range(50)]
    assert client.payloads == [b"answer %d" % i for i in range(50)]


def test_frames_that_are_sent_together_arrive_in_one_poll(path: Path, ends: Callable[..., End]) -> None:
    """Or requests that are handed over together would start one by one."""
    server, client = ends(listen=path), ends(dial={"small": path})
    until(lambda: bool(server.peers and client.peers), server, client, why="connected")
    payloads = [b"%d" % i * 500 for i in range(64)]
    client.carrier.send(client.peers[0], *payloads)
    until(lambda: bool(server.payloads), server, why="frames")
    assert server.payloads == payloads


def test_a_peer_that_listens_later_is_found(path: Path, ends: Callable[..., End]) -> None:
    client = ends(dial={"small": path})
    client.poll()
    assert client.events == []
    server = ends(listen=path)
    until(lambda: bool(server.peers and client.peers), server, client, why="connected")


def test_a_peer_that_restarts_is_found_again_under_a_new_number(path: Path, ends: Callable[..., End]) -> None:
    server, client = ends(listen=path), ends(dial={"small": path})
    until(lambda: bool(server.peers and client.peers), server, client, why="connected")
    server.carrier.close()
    until(lambda: client.lost == client.peers, client, why="the loss is reported")
    server = ends(listen=path)
    until(lambda: len(client.peers) == 2 and bool(server.peers), server, client, why="connected again")
    assert len(set(client.peers)) == 2
    client.carrier.send(client.peers[0], b"to the dead")
    client.carrier.send(client.peers[1], b"to the living")
    until(lambda: bool(server.payloads), server, client, why="a frame")
    assert server.payloads == [b"to the living"]


def test_a_dropped_peer_is_reported_and_dialled_again(path: Path, ends: Callable[..., End]) -> None:
    server, client = ends(listen=path), ends(dial={"small": path})
    until(lambda: bool(server.peers and client.peers), server, client, why="connected")
    client.carrier.drop(client.peers[0])
    client.carrier.drop(client.peers[0])
    until(lambda: len(client.peers) == 2 and len(server.peers) == 2, server, client, why="connected again")
    assert client.lost == client.peers[:1]
    assert server.lost == server.peers[:1]


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


def test_big_frames_pass_a_slow_reader_without_blocking_the_sender(path: Path, ends: Callable[..., End]) -> None:
    server, client = ends(listen=path), ends(dial={"small": path})
    until(lambda: bool(server.peers and client.peers), server, client, why="connected")
    rng = random.Random(0)
    sent = [rng.randbytes(size) for size in (3_000_000, 0, 1, 2_000_000, 77)]
    for payload in sent:
        client.carrier.send(client.peers[0], payload)  # nobody reads yet
    until(lambda: len(server.payloads) == len(sent), server, client, why="all frames")
    assert server.payloads == sent


def test_a_peer_that_dies_with_frames_unsent_is_reported_once(path: Path, ends: Callable[..., End]) -> None:
    server, client = ends(listen=path), ends(dial={"small": path})
    until(lambda: bool(server.peers and client.peers), server, client, why="connected")
    client.carrier.send(client.peers[0], bytes(5_000_000))
    server.carrier.close()
    until(lambda: bool(client.lost), client, why="the loss is reported")
    client.carrier.send(client.peers[0], b"more")
    client.poll()
    assert client.lost == client.peers[:1]


def test_frames_sent_before_a_peer_closed_still_arrive(path: Path, ends: Callable[..., End]) -> None:
    server, client = ends(listen=path), ends(dial={"small": path})
    until(lambda: bool(server.peers and client.peers), server, client, why="connected")
    client.carrier.send(client.peers[0], b"last words")
    client.carrier.close()
    until(lambda: bool(server.lost), server, why="the loss is reported")
    assert server.payloads == [b"last words"]


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


def test_another_thread_can_wake_a_sleeping_poll(path: Path, ends: Callable[..., End]) -> None:
    server = ends(listen=path)
    woken = threading.Event()

    def sleep() -> None:
        assert server.carrier.poll(None) == []
        woken.set()

    thread = threading.Thread(target=sleep)
    thread.start()
    server.carrier.wake()
    assert woken.wait(PATIENCE_S), "wake did not end the poll"
    thread.join()


def test_wakes_before_a_poll_are_not_lost_and_count_once(path: Path, ends: Callable[..., End]) -> None:
    server = ends(listen=path)
    server.carrier.wake()
    server.carrier.wake()
    started = time.monotonic()
    assert server.carrier.poll(PATIENCE_S) == []
    assert time.monotonic() - started < PATIENCE_S / 2, "the wake was lost"
    assert server.carrier.poll(0.0) == []


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
