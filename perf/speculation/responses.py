"""Finite responses to the same requests: what they say, and when their tokens came."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from perf.serving.run import Plan
from perf.serving.window import ENTRY
from tools.load import ClosedLoop, request_bytes

TOKENS = 48
"""Of a response."""
_PER_CLIENT = 4
_OUTPUTS = ("output_ids", "finish_reason", "routing")


@dataclass
class Responses:
    """Of all requests together.

    Attributes:
        exact: by request: token ids, writers by position, the numbers in `routing`, finish reason.
        first_s: from sending to the first token, in seconds.
        between_s: between tokens of a response; 0 between those that came in one message.
    """

    exact: list[tuple[Any, ...]] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)


def served(url: str, plan: Plan, in_flight: int) -> Responses:
    """Sends `_PER_CLIENT` requests per place in flight, `in_flight` at a time, and waits for all.

    Raises:
        LoadError: one failed, or hangs.
    """
    count = _PER_CLIENT * in_flight

    def request(number: int) -> bytes | None:
        if number >= count:
            return None
        return request_bytes(
            ENTRY,
            plan.prompt(number),
            max_tokens=TOKENS,
            request_id=str(number),
            outputs=_OUTPUTS,
            seed=number,
            return_routing=True,
        )

    with ClosedLoop(url, request, in_flight, keep=True) as loop:
        for _ in loop.ticks():
            if loop.over:
                break
        messages: list[list[tuple[float, Mapping[str, Any]]]] = [[] for _ in range(count)]
        for number, at_s, tensors in loop.messages():
            messages[number].append((at_s, tensors))
    found = Responses()
    for sent_s, received in zip(loop.sent_s, messages, strict=True):
        _timed(found, sent_s, received)
        found.exact.append(exact(tensors for _, tensors in received))
    return found


def _timed(found: Responses, sent_s: float, received: list[tuple[float, Mapping[str, Any]]]) -> None:
    last_s = None
    for at_s, tensors in received:
        tokens = tensors["output_ids"].size if "output_ids" in tensors else 0
        if not tokens:
            continue
        if last_s is None:
            found.first_s.append(at_s - sent_s)
        else:
            found.between_s.append(at_s - last_s)
        found.between_s += [0.0] * (tokens - 1)
        last_s = at_s


def exact(messages: Iterable[Mapping[str, Any]]) -> tuple[Any, ...]:
    """What has to be equal, however a response was cut into messages."""
    ids: list[int] = []
    writers: list[tuple[str, int]] = []
    totals: dict[str, Any] = {}
    reason = ""
    for tensors in messages:
        ids += tensors["output_ids"].reshape(-1).tolist() if "output_ids" in tensors else []
        if "finish_reason" in tensors:
            reason = tensors["finish_reason"].reshape(-1)[0].decode()
        routing = json.loads(tensors["routing"].reshape(-1)[0])
        writers += [(run["model"], at) for run in routing.pop("runs") for at in range(run["start"], run["end"])]
        totals |= routing
    return tuple(ids), tuple(writers), tuple(sorted(totals.items(), key=lambda item: item[0])), reason
