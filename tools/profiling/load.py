"""Load for profiling: a closed loop of requests, with rising numbers in flight so that every batch size is seen."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

from tools.dtmc.errors import ProfileError
from tools.load import Stream, request_bytes

DRAIN_S = 1.0
"""After a stage: cancelled requests are gone, and the last numbers are published."""


def read_prompts(path: Path) -> list[str]:
    """The field `prompt` of every line of a JSON Lines file.

    Raises:
        ProfileError: the file cannot be read, or has no prompts.
    """
    try:
        prompts = [str(json.loads(line)["prompt"]) for line in path.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ProfileError(f"{path}: give JSON lines with a field 'prompt' ({type(exc).__name__}: {exc})") from exc
    if not prompts:
        raise ProfileError(f"{path}: empty; give JSON lines with a field 'prompt'")
    return prompts


def stages(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    return sorted({min(1 << power, most) for power in range(most.bit_length() + 1)})


class ClosedLoop:
    """Keeps requests running; a context manager. Seeds are 0, 1, 2, ... in the order of sending.

    Args:
        url: host:port of the gRPC endpoint.
        model: the entry model.
        prompts: used in turn.
        max_tokens: of every response.
        in_flight: requests at once.
    """

    def __init__(self, url: str, model: str, prompts: Sequence[str], *, max_tokens: int, in_flight: int) -> None:
        self._requests = self._endless(model, prompts, max_tokens)
        self._in_flight = in_flight
        self._stream = Stream(url)
        self._stream.on_finished = self._send

    def __enter__(self) -> ClosedLoop:
        for _ in range(self._in_flight):
            self._send()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.on_finished = None
        self._stream.close()

    @property
    def finished(self) -> int:
        """Responses that ended."""
        return self._stream.arrivals.finished

    def check(self) -> None:
        """Raises ProfileError if the server failed a request, or the connection broke."""
        if self._stream.arrivals.errors:
            raise ProfileError(f"load: {self._stream.arrivals.errors[0].strip().splitlines()[0]}")

    def _send(self) -> None:
        self._stream.send(next(self._requests))

    @staticmethod
    def _endless(model: str, prompts: Sequence[str], max_tokens: int) -> Iterator[bytes]:
        for index in count():
            yield request_bytes(model, prompts[index % len(prompts)], max_tokens=max_tokens, seed=index)


def run_stages(
    url: str,
    model: str,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    in_flight: Sequence[int],
    seconds: float,
    report: Callable[[str, float], None],
) -> None:
    """Runs each number in flight for the same time, `seconds` together.

    Raises:
        ProfileError: the server cannot be reached or fails requests.
    """
    for done, n in enumerate(in_flight):
        report(f"load with {n} in flight", done / len(in_flight))
        with ClosedLoop(url, model, prompts, max_tokens=max_tokens, in_flight=n) as loop:
            time.sleep(seconds / len(in_flight))
            loop.check()
    time.sleep(DRAIN_S)
