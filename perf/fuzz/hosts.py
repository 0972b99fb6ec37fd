"""`python -m perf.fuzz.hosts --requests 5000 --seed 1`: strangers at the port at which a model serves other hosts.

A server of emulated models whose large one is reached over TLS. Strangers connect to its port and send what is no TLS,
a handshake that breaks off or turns into noise, a handshake without certificate, or nothing, from a generator with a
seed; a neighbour generates meanwhile. Checks: the neighbour's tokens are those of a calm server, its connection is
never lost, no process ends, and the model's memory stays flat. Ends with exit code 1 if one of them does not hold.
"""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import psutil
import typer

from perf.command import run
from perf.emulated.repository import write_emulated_repository
from perf.fuzz.frames import traffic
from perf.hosts.ways import TLS, UNIX, serve
from tokenrouter.channel.address import Address
from tokenrouter.client import stream
from tokenrouter.metrics_page import scrape
from tokenrouter.repository import Repository
from tools.tritonserver.server import TritonServer

_READ = 1 << 16
_PATIENCE_S = 20.0
_TOKENS = 300
_GROWTH = 1.15
_WARM_UP = 0.3
KINDS = ("plain", "noise", "broken off", "no certificate", "silent")


def _trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def client_hello(draw: random.Random) -> bytes:
    """A sound first flight of TLS."""
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        _trusting().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=f"h{draw.randrange(9)}").do_handshake()
    return outgoing.read()


def attack(address: Address, draw: random.Random, patience_s: float = _PATIENCE_S) -> tuple[str, str]:
    """One connection. Returns its kind, and ``closed`` or ``open``: still so when the stranger's patience ends."""
    kind = draw.choice(KINDS)
    hello = client_hello(draw)
    data = {
        "plain": b"".join(traffic(draw)),
        "noise": hello + draw.randbytes(draw.randrange(4000)),
        "broken off": hello[: draw.randrange(len(hello))],
    }.get(kind, b"")
    with socket.socket() as peer:
        peer.settimeout(patience_s)
        try:
            peer.connect((address.host, address.port))
            if kind == "no certificate":
                with _trusting().wrap_socket(peer) as tls:
                    while tls.recv(_READ):
                        pass
            elif kind != "silent":
                peer.sendall(data)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(_READ):
                    pass
        except TimeoutError:
            return kind, "open"
        except OSError:
            pass  # reset while we wrote
    return kind, "closed"


def _answer(server: TritonServer) -> list[int]:
    chunks = stream(server.grpc_url, "abcdefgh", model=TLS.name, max_tokens=_TOKENS, min_tokens=_TOKENS)
    return [token for chunk in chunks for token in chunk.output_ids]


def _attacks(address: Address, requests: int, seed: int, outcomes: Counter[tuple[str, str]]) -> None:
    for number in range(requests):
        outcomes[attack(address, random.Random(f"{seed}/{number}"))] += 1


def main(
    requests: Annotated[int, typer.Option(min=1, help="Connections of strangers.")] = 5000,
    seed: Annotated[int, typer.Option(help="Of the generator.")] = 1,
) -> None:
    entry = {"policy": "scripted", "policy_params": {"writers": ["small", "large"]}, "aliases": {}}

    def write(folder: Path) -> Path:
        return write_emulated_repository(folder, step_ms={"small": 1.0, "large": 1.0}, entry=entry)

    failures: list[str] = []
    outcomes: Counter[tuple[str, str]] = Counter()
    with serve(write, [UNIX, TLS], "large") as server:
        address = Repository(server.repository).entry(TLS.name).hosts["large"]
        expected, pids = _answer(server), server.stub_pids()
        model = psutil.Process(pids["large"])
        strangers = threading.Thread(target=_attacks, args=(address, requests, seed, outcomes), daemon=True)
        strangers.start()
        memory: list[tuple[int, int]] = []
        answers = 0
        while strangers.is_alive():
            answers += 1
            if _answer(server) != expected:
                failures.append("a neighbour got other tokens")
            memory.append((sum(outcomes.values()), model.memory_info().rss))
            time.sleep(0.05)
        if server.stub_pids() != pids:
            failures.append("a process ended")
        recovered = scrape(server.metrics_url).value("tokenrouter_recovered", model=TLS.name)
        if recovered:
            failures.append(f"the neighbour's connection was lost: {recovered:.0f} recovered")
    warm = [rss for done, rss in memory if done >= _WARM_UP * requests] or [0]
    if warm[-1] > _GROWTH * warm[0]:
        failures.append(f"the model's memory grew from {warm[0]} to {warm[-1]} bytes")
    if still := sum(number for (_, outcome), number in outcomes.items() if outcome == "open"):
        failures.append(f"{still} connections were still open after {_PATIENCE_S:g} s")
    for (kind, outcome), number in sorted(outcomes.items()):
        print(f"{kind}: {number} {outcome}")
    print(f"neighbour: {answers} responses; memory of the model {warm[0] >> 20} to {warm[-1] >> 20} MiB")
    for failure in failures:
        print(f"FAILED: {failure}")
    if failures:
        raise typer.Exit(1)


if __name__ == "__main__":
    run(main)
