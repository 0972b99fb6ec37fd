"""Clients of a soak: finite streamed requests, every one with a time limit of its own."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc

from perf.load.client_threads import ClientThreads
from perf.load.streams import over_grpc
from perf.load.timing import Timing
from tools.load import open_channel, request_bytes

_OUTPUTS = ("text_output", "output_ids", "finish_reason")
_MOST_ERRORS = 20


@dataclass(frozen=True)
class Workload:
    """What is sent.

    Attributes:
        prompts: sent in turn.
        max_tokens: of a response.
        policies: used in turn; "" is the entry model's own.
        cancel_every: every so many-th request is cancelled by the client after a few tokens; 0 for none.
        watchdog_s: a response that takes longer has hung.
    """

    prompts: Sequence[str]
    max_tokens: int = 160
    policies: Sequence[str] = ("",)
    cancel_every: int = 0
    watchdog_s: float = 60.0

    def request(self, number: int) -> bytes:
        policy = self.policies[number % len(self.policies)]
        fields = {"policy": policy} if policy else {}
        prompt = self.prompts[number % len(self.prompts)]
        return request_bytes("tokenrouter", prompt, max_tokens=self.max_tokens, outputs=_OUTPUTS, **fields)

    def cancels_after(self, number: int) -> int:
        """Tokens after which the client cancels this request, from 1 to 8; 0 for never."""
        if not self.cancel_every or number % self.cancel_every:
            return 0
        return 1 + number // self.cancel_every % 8


@dataclass
class Served:
    """What clients got: requests by finish reason ("cancelled" by the client), and what failed."""

    requests: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    longest_s: float = 0.0
    errors: list[str] = field(default_factory=list)


class Clients(ClientThreads):
    """Keeps `in_flight` requests running from `start` to `stop`, each on a connection of its own.

    Unlike `tools.load.ClosedLoop`, every request has a time limit, and can be cancelled alone.
    """

    def __init__(self, url: str, workload: Workload, in_flight: int, served: Served) -> None:
        super().__init__(in_flight, workload.watchdog_s)
        self._url, self._workload, self._served = url, workload, served

    def _client(self) -> None:
        with open_channel(self._url) as channel:
            while not self._stopping.is_set() and len(self._served.errors) < _MOST_ERRORS:
                number, timing = next(self._numbers), Timing()
                try:
                    self._send(channel, number, timing)
                except Exception as exc:
                    timing.error = f"{type(exc).__name__}: {exc}"
                self._note(number, timing)

    def _send(self, channel: grpc.Channel, number: int, timing: Timing) -> None:
        load = self._workload
        request, cancel_after = load.request(number), load.cancels_after(number)
        over_grpc(channel, request, timing, timeout_s=load.watchdog_s, cancel_after=cancel_after)

    def _note(self, number: int, timing: Timing) -> None:
        served = self._served
        with self._lock:
            served.requests[timing.finish_reason or "error"] += 1
            served.tokens += timing.tokens
            served.longest_s = max(served.longest_s, time.perf_counter() - timing.started)
            if timing.error:
                served.errors.append(f"request {number}: {timing.error}")
