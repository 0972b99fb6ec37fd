"""The carrier between hosts: who may connect, who is told why not, and what becomes of peers that hang."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.support.channel import (
    ENTRY,
    LARGE,
    PATIENCE_S,
    STRANGER,
    End,
    certificates,
    dialling,
    listening,
    network,
    until,
)
from tests.support.commands import run
from tokenrouter.channel import tcp
from tokenrouter.channel.address import Address
from tokenrouter.channel.tcp import Network, Service
from tokenrouter.channel.tls import CERTIFICATE, Certificates
from tokenrouter.errors import ConfigError
from tokenrouter.protocol_version import OLDEST_VERSION, PROTOCOL_VERSION
from tools import certificates as command

HOUR_NS = 3600 * 10**9


@pytest.fixture(scope="module")
def keys() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield certificates(Path(folder))


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[End, Address]]]:
    opened: list[End] = []

    def start(own: Network, port: int = 0, **options: Any) -> tuple[End, Address]:
        carrier, address = listening(own, port, **options)
        opened.append(End(carrier))
        return opened[-1], address

    yield start
    for end in opened:
        end.carrier.close()


@pytest.fixture
def dial() -> Iterator[Callable[..., End]]:
    opened: list[End] = []

    def start(own: Network, address: Address, **options: Any) -> End:
        opened.append(End(dialling(own, {LARGE: address}, **options)))
        return opened[-1]

    yield start
    for end in opened:
        end.carrier.close()


def both(server: End, client: End) -> None:
    until(lambda: bool(server.peers and client.peers), server, client, why="connected")


@pytest.mark.parametrize(
    ("host", "change", "there", "here"),
    [
        (STRANGER, {}, "its certificate is of stranger.test; tls.peers allows entry.test", "it refuses us"),
        (ENTRY, {"repository": "other"}, "another model repository", "another model repository"),
        (ENTRY, {"version": PROTOCOL_VERSION - 2, "oldest": 1}, "release there is too old", "too old"),
    ],
    ids=["name", "repository", "version"],
)
def test_who_is_refused_is_told_why_and_both_logs_say_it(
    keys: Path,
    serve: Callable[..., Any],
    dial: Callable[..., End],
    caplog: pytest.LogCaptureFixture,
    host: str,
    change: dict[str, Any],
    there: str,
    here: str,
) -> None:
    server, address = serve(network(keys, LARGE))
    client = dial(network(keys, host, name="tokenrouter", **change), address)
    with caplog.at_level(logging.WARNING):
        until(lambda: bool(client.why), server, client, why="told")
        until(lambda: caplog.text.count("connection ended") >= 2, server, client, why="logged")
    assert here in client.why[0]
    assert there in caplog.text
    assert not server.peers
    assert not client.peers


def test_the_version_before_is_taken(keys: Path, serve: Callable[..., Any], dial: Callable[..., End]) -> None:
    server, address = serve(network(keys, LARGE))
    both(server, dial(network(keys, ENTRY, version=PROTOCOL_VERSION - 1, oldest=OLDEST_VERSION - 1), address))


def test_an_authority_that_nobody_knows(
    keys: Path, tmp_path: Path, serve: Callable[..., Any], dial: Callable[..., End]
) -> None:
    other = certificates(tmp_path / "other")
    server, address = serve(network(keys, LARGE))
    client = dial(network(other, ENTRY), address)
    until(lambda: bool(client.why), server, client, why="told")
    assert "the peer's certificate is refused: self-signed certificate in certificate chain" in client.why[0]
    mixed = tmp_path / "mixed" / ENTRY
    mixed.mkdir(parents=True)
    for name in ("tls.crt", "tls.key"):
        (mixed / name).write_bytes((other / ENTRY / name).read_bytes())
    (mixed / "ca.crt").write_bytes((keys / "ca.crt").read_bytes())
    client = dial(network(mixed.parent, ENTRY), address)
    until(lambda: bool(client.why), server, client, why="told")
    assert "the peer does not know the CA of our certificate" in client.why[0]
    assert not server.peers


def test_a_host_whose_certificate_is_of_another_name(
    keys: Path, serve: Callable[..., Any], dial: Callable[..., End]
) -> None:
    server, address = serve(network(keys, STRANGER, name=LARGE))
    client = dial(network(keys, ENTRY), address)
    until(lambda: bool(client.why), server, client, why="told")
    assert "IP address mismatch" in client.why[0]
    assert not server.peers


def test_plain_text_is_no_tls(
    keys: Path, serve: Callable[..., Any], dial: Callable[..., End], caplog: pytest.LogCaptureFixture
) -> None:
    server, address = serve(network(keys, LARGE))
    client = dial(network(None, ENTRY), address)
    until(lambda: bool(client.why), server, client, why="closed")
    until(lambda: "does not speak TLS" in caplog.text, server, why="the log says why")
    assert not server.peers
    mesh, address = serve(network(None, LARGE))
    client = dial(network(keys, ENTRY), address)
    until(lambda: bool(client.why), mesh, client, why="closed")
    assert not mesh.peers


def test_strangers_take_nothing_and_keep_nobody_out(
    keys: Path, serve: Callable[..., Any], dial: Callable[..., End]
) -> None:
    """Connections that say nothing are bounded, and one that has a certificate comes in beside them."""
    server, address = serve(network(keys, LARGE))
    silent = [socket.create_connection((address.host, address.port)) for _ in range(100)]
    until(lambda: len(server.carrier._timed) >= 64, server, why="accepted")  # type: ignore[attr-defined]
    client = dial(network(keys, ENTRY), address)
    both(server, client)
    assert len(server.carrier._timed) <= 65  # type: ignore[attr-defined]
    for peer in silent:
        peer.close()
    until(lambda: len(server.carrier._timed) == 1, server, client, why="all gone")  # type: ignore[attr-defined]
    assert server.lost == []


def test_a_stranger_without_certificate_is_nobody(keys: Path, serve: Callable[..., Any]) -> None:
    server, address = serve(network(keys, LARGE))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(keys / "ca.crt")
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
    with socket.create_connection((address.host, address.port)) as peer:
        peer.settimeout(0.05)
        end = time.monotonic() + PATIENCE_S
        closed = False
        while not closed and time.monotonic() < end:
            server.poll(0.01)
            with contextlib.suppress(ssl.SSLWantReadError):
                tls.do_handshake()
            peer.sendall(outgoing.read())
            try:
                data = peer.recv(1 << 16)
                closed = not data
                incoming.write(data)
            except TimeoutError:
                pass
            except ConnectionError:
                closed = True
    assert closed
    assert server.events == []


def test_a_new_connection_of_a_process_replaces_its_old_one(
    keys: Path, serve: Callable[..., Any], dial: Callable[..., End]
) -> None:
    """Else the half-dead one would keep its place, and its KV, until a time-out."""
    server, address = serve(network(keys, LARGE))
    first = dial(network(keys, ENTRY), address)
    both(server, first)
    second = dial(network(keys, ENTRY), address)
    until(lambda: len(server.peers) == 2, server, second, why="connected anew")
    assert server.lost == server.peers[:1]
    other = dial(network(keys, ENTRY, instance=7), address)
    until(lambda: len(server.peers) == 3, server, second, other, why="another process")
    assert server.lost == server.peers[:1]


def test_certificates_are_read_again_when_they_change(
    tmp_path: Path, serve: Callable[..., Any], dial: Callable[..., End], caplog: pytest.LogCaptureFixture
) -> None:
    """One that has expired lets nobody in until it is replaced; nothing is started again."""
    yesterday = datetime.now(timezone.utc) - timedelta(days=1)
    keys = certificates(tmp_path, begins=yesterday, lasts=timedelta(hours=1))
    server, address = serve(network(keys, LARGE))
    client = dial(network(keys, ENTRY), address)
    until(lambda: bool(client.why), server, client, why="told")
    assert "certificate has expired" in client.why[0]
    certificates(tmp_path)
    both(server, client)
    (tmp_path / LARGE / CERTIFICATE).write_text("half")
    second = dial(network(keys, ENTRY, instance=7), address)
    until(lambda: len(server.peers) == 2, server, client, second, why="the last good ones are in force")
    assert "stay in force" in caplog.text


def test_clocks_an_hour_apart_are_told_apart(keys: Path, serve: Callable[..., Any], dial: Callable[..., End]) -> None:
    server, address = serve(network(keys, LARGE), clock_ns=lambda: time.monotonic_ns() + HOUR_NS)
    client = dial(network(keys, ENTRY), address)
    both(server, client)
    until(lambda: client.carrier.offset_ns(client.peers[0]) is not None, server, client, why="known")
    offset_ns = client.carrier.offset_ns(client.peers[0])
    assert offset_ns == pytest.approx(HOUR_NS, abs=10**9)


def test_a_peer_that_hangs_is_given_up(keys: Path, serve: Callable[..., Any], dial: Callable[..., End]) -> None:
    """Its kernel still acknowledges every byte; it is the loop that says nothing. The clock makes it soon."""
    later_ns = [0]
    server, address = serve(network(keys, LARGE))
    client = dial(network(keys, ENTRY), address, clock_ns=lambda: time.monotonic_ns() + later_ns[0])
    both(server, client)
    later_ns[0] = 31 * 10**9
    until(lambda: bool(client.lost), client, why="given up")
    assert "it has said nothing for 3" in client.why[-1]


def test_a_name_that_does_not_resolve_is_told(
    keys: Path, dial: Callable[..., End], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(address: Address) -> list[tcp.Target]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(tcp, "look_up", nowhere)
    client = dial(network(keys, ENTRY), Address("gpu-b.test"))
    until(lambda: bool(client.why), client, why="told")
    assert client.why == ["gpu-b.test:8004 does not resolve: Name or service not known (models.large.host)"]


def test_all_addresses_of_a_name_are_tried_each_time(
    keys: Path, serve: Callable[..., Any], dial: Callable[..., End], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, address = serve(network(keys, LARGE))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        dead = free.getsockname()
    looked: list[Address] = []

    def both_of(wanted: Address) -> list[tcp.Target]:
        looked.append(wanted)
        return [(socket.AF_INET, dead), (socket.AF_INET, (address.host, address.port))]

    monkeypatch.setattr(tcp, "look_up", both_of)
    client = dial(network(keys, ENTRY), Address("localhost.test"))
    until(lambda: "Hostname mismatch" in "".join(client.why), server, client, why="the certificate has another name")
    until(lambda: len(looked) > 1, server, client, why="looked up again")


def test_what_cannot_be_listened_on_is_refused_with_the_remedy(keys: Path, serve: Callable[..., Any]) -> None:
    own = network(keys, LARGE)
    server, address = serve(own)
    with pytest.raises(ConfigError, match=rf"{address} is in use: a model is served on one host only"):
        Service(own, address).open(patience_s=0.1)
    with pytest.raises(ConfigError, match=r"cannot listen on 192.0.2.1:8004: .*models\.\*\.listen"):
        Service(own, Address("192.0.2.1")).open(patience_s=0.0)
    with pytest.raises(ConfigError, match=r"cannot listen on gpu.invalid:8004: .*models\.\*\.host"):
        Service(own, Address("gpu.invalid")).open(patience_s=0.0)
    assert server.peers == []


def test_a_model_that_is_served_on_another_host_is_not_served_here(keys: Path, serve: Callable[..., Any]) -> None:
    import threading

    own = network(keys, LARGE)
    server, address = serve(own)
    stopped = threading.Event()

    def poll() -> None:
        while not stopped.is_set():
            server.poll(0.01)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="is in use: a model is served on one host only"):
            Service(own, address, Address("127.0.0.1", address.port + 1)).open(patience_s=0.0)
    finally:
        stopped.set()
        thread.join()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "ca.crt").unlink(), "ca.crt: No such file.*tls.folder.*tools.certificates"),
        (lambda folder: (folder / "ca.crt").write_text("x"), "ca.crt is no PEM file of certificates"),
        (lambda folder: (folder / "tls.crt").write_text("x"), "tls.crt and tls.key are no certificate and its key"),
        (
            lambda folder: (folder / "tls.key").write_bytes((folder.parent / ENTRY / "tls.key").read_bytes()),
            "tls.crt and tls.key are no certificate and its key in PEM: key values mismatch",
        ),
    ],
    ids=["missing", "authority", "certificate", "key"],
)
def test_certificates_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, spoil: Callable[[Path], object], words: str
) -> None:
    folder = certificates(tmp_path) / LARGE
    spoil(folder)
    with pytest.raises(ConfigError, match=words):
        Certificates(folder)


def test_the_command_for_trial_certificates(tmp_path: Path) -> None:
    result = run(
        command.main, "--output", tmp_path / "c", "--name", "a=127.0.0.1,a.test", "--name", "spiffe=spiffe://x/y"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0] == f"{tmp_path / 'c' / 'a'}: 127.0.0.1, a.test"
    assert (tmp_path / "c" / "a" / "tls.key").stat().st_mode & 0o777 == 0o600
    first = (tmp_path / "c" / "ca.crt").read_bytes()
    assert run(command.main, "--output", tmp_path / "c", "--name", "b").exit_code == 0
    assert (tmp_path / "c" / "b" / "ca.crt").read_bytes() == first
    for wrong in ("=x", "a/b=x", "a=x y", ".=x"):
        refused = run(command.main, "--output", tmp_path / "d", "--name", wrong)
        assert refused.exit_code == 2, wrong
        assert len(refused.stderr.splitlines()) == 1
    (tmp_path / "c" / "ca.key").unlink()
    assert "has only one of" in run(command.main, "--output", tmp_path / "c", "--name", "b").stderr
