"""What happens to a deployment: processes die or stand still, and clients do what clients should not."""

from __future__ import annotations

import os
import random
import signal
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from types import MappingProxyType
from typing import TypeAlias

import grpc

from perf.chaos.service import ENTRY, FRONT, SERVER, Service
from perf.fuzz.answers import Answers
from perf.fuzz.channel import ChannelSender
from perf.fuzz.http import http_request
from perf.fuzz.openai import openai_request
from perf.fuzz.senders import GrpcSender, HttpSender, Sender
from perf.stall.attacks import ATTACKS, attack
from tools.load import METHOD, Stream, open_channel, request_bytes

_PROMPT = "Start 1: +1 ="
_PATIENCE_S = 180.0
_MALFORMED = 60
_FLOOD = 200
_LEAVERS = 20
_OVERSIZED = [name for name in ATTACKS if name not in ("nothing", "policy that loads a file")]

Act: TypeAlias = Callable[[Service, random.Random], list[str]]
"""Does it, and returns what went wrong for whoever was part of it: requests without an answer."""


def kill(name: str) -> Act:
    """SIGKILL of one process."""

    def act(service: Service, draw: random.Random) -> list[str]:
        os.kill(service.processes()[name], signal.SIGKILL)
        return []

    return act


def stand_still(name: str) -> Act:
    """SIGSTOP, and SIGCONT up to three seconds later."""

    def act(service: Service, draw: random.Random) -> list[str]:
        pid = service.processes()[name]
        os.kill(pid, signal.SIGSTOP)
        time.sleep(draw.uniform(0.2, 3.0))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        return []

    return act


def reload(name: str) -> Act:
    """An operator unloads a model and loads it again at once."""

    def act(service: Service, draw: random.Random) -> list[str]:
        api = service.repository_api()
        api.unload(name)
        api.load(name, timeout_s=_PATIENCE_S)
        return []

    return act


def malformed(protocol: str) -> Act:
    """Requests of `perf.fuzz`."""

    def act(service: Service, draw: random.Random) -> list[str]:
        answers = Answers()
        with closing(_sender(protocol, service, answers)) as send:
            for _ in range(_MALFORMED):
                send(draw)
        return [f"{kind} over {protocol} was not answered: {why}" for kind, why in answers.unanswered]

    return act


def _sender(protocol: str, service: Service, answers: Answers) -> Sender:
    if protocol == "grpc":
        return GrpcSender(service.to.grpc, answers, _PATIENCE_S)
    if protocol == "channel":
        return ChannelSender(service.sockets, answers, _PATIENCE_S)
    made = openai_request if protocol == "v1" else http_request
    return HttpSender(service.to.openai if protocol == "v1" else service.to.http, made, answers, _PATIENCE_S)


def oversized(service: Service, draw: random.Random) -> list[str]:
    """Two of the requests that cost most to read, at once."""
    bodies = [ATTACKS[name](draw.randrange(1000)) for name in draw.sample(_OVERSIZED, 2)]
    attack(f"http://127.0.0.1:{service.to.http}", bodies)
    return []


def flood(service: Service, draw: random.Random) -> list[str]:
    """Many short requests at once: they wait or are refused, and each is told so."""
    stream = Stream(service.grpc_url)
    for seed in range(_FLOOD):
        stream.send(request_bytes(ENTRY, _PROMPT, max_tokens=4, seed=seed))
    until, arrivals = time.monotonic() + _PATIENCE_S, stream.arrivals
    while (over := arrivals.finished + len(arrivals.errors)) < _FLOOD and time.monotonic() < until:
        time.sleep(0.05)
    stream.close()
    return [] if over >= _FLOOD else [f"{_FLOOD - over} of {_FLOOD} requests of a flood were not answered"]


def leave(service: Service, draw: random.Random) -> list[str]:
    """Clients go away in the middle of their responses: connections are reset, calls cancelled."""
    body = f'{{"text_input": "{_PROMPT}", "max_tokens": 500, "end_id": 257, "stream": true}}'.encode()
    head = (
        f"POST /v2/models/{ENTRY}/generate_stream HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    )
    with closing(open_channel(service.grpc_url)) as connection:
        for _ in range(_LEAVERS):
            _reset(service.to.http, head + body, draw.uniform(0.0, 0.05))
            request = request_bytes(ENTRY, _PROMPT, max_tokens=500, end_id=257)
            call = connection.stream_stream(METHOD)(iter((request,)), timeout=_PATIENCE_S)
            with suppress(grpc.RpcError, StopIteration):
                next(call)
            call.cancel()
    return []


def _reset(port: int, request: bytes, after_s: float) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=_PATIENCE_S) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(request)
        time.sleep(after_s)


MODELS = ("small", "large")
LIFE: Sequence[str] = (*MODELS, ENTRY, SERVER, FRONT)

EVENTS: Mapping[str, Act] = MappingProxyType(
    {
        **{f"kill {name}": kill(name) for name in LIFE},
        **{f"stop {name}": stand_still(name) for name in LIFE},
        **{f"reload {name}": reload(name) for name in MODELS},
        **{f"malformed {protocol}": malformed(protocol) for protocol in ("http", "grpc", "v1", "channel")},
        "oversized": oversized,
        "flood": flood,
        "leave": leave,
    }
)
"""Everything that can happen, by name."""

ATTACKING = ("malformed http", "malformed grpc", "malformed v1", "malformed channel", "oversized")
"""Beside these, running streams may not stall."""


def in_order(seed: int) -> list[str]:
    """Every kind once in an order that follows from the seed."""
    names = list(EVENTS)
    random.Random(seed).shuffle(names)
    return names
