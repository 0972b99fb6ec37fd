"""Streams that run all the time in a process of their own, and short requests, to see what else makes them wait.

Times are seconds on `time.perf_counter`, which all processes of a Linux host share, so that whoever does something can
ask afterwards what the responses did meanwhile, however busy its own process was.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from tools.load import ClosedLoop, LoadError, request_bytes

_LOOK_S = 0.02
_ENDLESS = 1_000_000
_START_S = 60.0

Gaps = list[list[float]]


class Prober:
    """A context manager; it is ready once every stream has begun.

    Streams that break (the server died, or failed them) are opened again, and the break is no gap.

    Args:
        url: host:port of Triton's gRPC endpoint.
        model: whom to call.
        streams: responses that run at once.
        prompt: of every request.
        max_tokens: of a stream; by default as good as endless, for emulated models.
        fields: further input tensors.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "tokenrouter",
        streams: int = 2,
        prompt: str = "abcdefgh",
        max_tokens: int = _ENDLESS,
        **fields: Any,
    ) -> None:
        endless = request_bytes(model, prompt, max_tokens=max_tokens, **fields)
        short = request_bytes(model, prompt, max_tokens=1, **fields)
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_probe, args=(url, [endless] * streams, short, theirs), daemon=True)

    def __enter__(self) -> Prober:
        self._process.start()
        if not self._pipe.poll(_START_S):
            self.__exit__()
            raise TimeoutError(f"the prober's streams did not begin in {_START_S:g} s")
        self._pipe.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()

    def gaps(self, start_s: float, end_s: float) -> list[float]:
        """Seconds between two messages of a response, of all streams, where they touch the time from start to end.

        One that goes on still counts as long as it is by now.
        """
        return self._ask("gaps", start_s, end_s)

    def waits(self, start_s: float, end_s: float) -> list[float]:
        """Seconds that short requests took which were sent in that time; one that goes on as long as it is by now."""
        return self._ask("waits", start_s, end_s)

    def _ask(self, what: str, start_s: float, end_s: float) -> list[float]:
        self._pipe.send((what, start_s, end_s))
        found: list[float] = self._pipe.recv()
        return found


class _Probe:
    """One closed loop with one request at a time, which is opened again when it breaks."""

    def __init__(self, url: str, request: bytes) -> None:
        self._url, self._request = url, request
        self.over: list[ClosedLoop] = []
        self.loop = self._open()

    def _open(self) -> ClosedLoop:
        return ClosedLoop(self._url, lambda _: self._request, 1).__enter__()

    def mend(self) -> None:
        """Opens another one if this one broke."""
        if self.loop.arrivals.errors:
            self.loop.__exit__(LoadError)
            self.over.append(self.loop)
            self.loop = self._open()

    def loops(self) -> Iterator[tuple[Sequence[float], Sequence[float], bool]]:
        """When messages came and requests were sent, per connection, and whether it is the one that is open."""
        for loop in (*self.over, self.loop):
            yield list(loop.arrivals.times), list(loop.sent_s), loop is self.loop


def gaps_between(
    sent: Sequence[float], times: Sequence[float], start_s: float, end_s: float, open_until_s: float | None
) -> list[float]:
    """Differences of successive times of one response that touch [start, end].

    The last one goes on until now if the stream is open. One request follows the other: what was sent between two
    messages begins another response.
    """
    moments = [*times, open_until_s] if times and open_until_s is not None else times
    return [
        after - before
        for before, after in pairwise(moments)
        if after >= start_s and before <= end_s and bisect(sent, before) == bisect(sent, after)
    ]


def waits_of(
    sent: Sequence[float], times: Sequence[float], start_s: float, end_s: float, open_until_s: float | None
) -> list[float]:
    """From sending to the only message of each request."""
    ended = [*times, *([open_until_s] * (len(sent) - len(times)) if open_until_s is not None else ())]
    return [end - begin for begin, end in zip(sent, ended, strict=False) if start_s <= begin <= end_s]


def _probe(url: str, endless: list[bytes], short: bytes, pipe: Connection) -> None:
    streams, newcomer = [_Probe(url, request) for request in endless], _Probe(url, short)
    probes = [*streams, newcomer]
    ready = False
    while True:
        for probe in probes:
            probe.mend()
        if not ready and all(probe.loop.arrivals.times for probe in probes):
            ready = True
            pipe.send("ready")
        if pipe.poll(_LOOK_S):
            what, start_s, end_s = pipe.recv()
            pipe.send(_answer(what, streams if what == "gaps" else [newcomer], start_s, end_s))


def _answer(what: str, probes: Sequence[_Probe], start_s: float, end_s: float) -> list[float]:
    found: list[float] = []
    for times, sent, is_open in (each for probe in probes for each in probe.loops()):
        now_s = time.perf_counter() if is_open else None
        if what == "gaps":
            found += gaps_between(sent, times, start_s, end_s, now_s)
        else:
            found += waits_of(sent, times, start_s, end_s, now_s)
    return found
