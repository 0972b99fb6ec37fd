"""Load test of a running server with locust: streamed responses over gRPC or HTTP, closed or open loop.

    locust -f perf/load/locustfile.py --headless --users 8 --run-time 60s GrpcStreamUser
    locust -f perf/load/locustfile.py --headless --users 1 --arrival-rate 4 --run-time 60s HttpStreamUser

Responses that run at the end have 30 s (`--stop-timeout`) to end; those that do not have hung, and count as errors.

Closed loop: every user has one response running, all the time. Open loop (`--arrival-rate`): requests start when they
are due, however many still run, and their times count from when they were due. Every response is reported four times:
`response` (its length is the number of tokens), `time to first token`, `inter-token time` (mean of the response) and
`longest gap`. Locust rounds percentiles to whole milliseconds and mixes all four in `Aggregated`; the exact table is
printed at the end, and added to a CSV with `--summary FILE`. Without `--run-time` it runs for a minute.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from itertools import cycle
from pathlib import Path
from typing import Any, ClassVar

import gevent
import grpc.experimental.gevent as grpc_gevent
from gevent.pool import Group
from locust import User, events, task

from perf.load.streams import over_grpc, over_http
from perf.load.timing import Timing, summary
from perf.rows import append_rows, show, upright
from tools.load import PROMPTS, open_channel, read_prompts, request_bytes

grpc_gevent.init_gevent()

_OUTPUTS = ("text_output", "output_ids", "finish_reason")
_timings: list[Timing] = []
_prompts: Iterator[str] = iter(())
_random = random.Random(1)  # arrivals are the same in every run
_cpu_s = 0.0


def options(parser: Any) -> None:
    parser.set_defaults(run_time="60s", stop_timeout="30s")
    group = parser.add_argument_group("TokenRouter")
    group.add_argument("--url", default="127.0.0.1:8001", help="Triton's gRPC endpoint")
    group.add_argument("--http-url", default="127.0.0.1:8000", help="Triton's HTTP endpoint")
    group.add_argument("--model", default="tokenrouter", help="the entry model, or a subserver")
    group.add_argument("--prompts", type=Path, default=PROMPTS, help='JSON lines, each {"prompt": "..."}')
    group.add_argument("--max-tokens", type=int, default=160, help="of a response")
    group.add_argument("--fields", default="{}", help='further input tensors, like {"policy": "r2r"}')
    group.add_argument("--arrival-rate", type=float, default=0.0, help="open loop: requests per second of all users")
    group.add_argument("--most-open", type=int, default=256, help="open loop: a user's requests that may run at once")
    group.add_argument("--request-timeout", type=float, default=120.0, help="seconds until a response counts as hung")
    group.add_argument("--summary", type=Path, help="CSV file to add the exact table to")


def start(environment: Any, **_: Any) -> None:
    global _prompts, _cpu_s
    _timings.clear()
    _cpu_s = time.process_time()
    _prompts = cycle(read_prompts(environment.parsed_options.prompts))


def report(environment: Any, **_: Any) -> None:
    chosen = environment.parsed_options
    tokens = sum(timing.tokens for timing in _timings)
    cpu_s = time.process_time() - _cpu_s
    rows = [
        {
            "tool": "locust",
            "user": " ".join(user.__name__ for user in environment.user_classes),
            "loop": f"open, poisson {chosen.arrival_rate:g}/s" if chosen.arrival_rate else "closed",
            "in_flight": "" if chosen.arrival_rate else chosen.num_users or 1,
            **summary(_timings),
            "client_cpu_s_per_1000_tokens": round(1000 * cpu_s / tokens, 3) if tokens else "",
        }
    ]
    if _timings:
        show(upright(rows))
    if chosen.summary:
        append_rows(chosen.summary, rows)


_events: Any = events  # locust's types leave its decorators untyped
_events.init_command_line_parser.add_listener(options)
_events.test_start.add_listener(start)
_events.quitting.add_listener(report)


class _StreamingUser(User):
    """Sends prompts by a loop; subclasses send one."""

    abstract = True
    protocol: ClassVar[str] = ""

    def on_start(self) -> None:
        self.chosen = self.environment.parsed_options
        self.fields = {"max_tokens": self.chosen.max_tokens, **json.loads(self.chosen.fields)}
        self._running = Group()
        self._due = time.perf_counter()

    def on_stop(self) -> None:
        try:
            self._running.join(timeout=self.environment.stop_timeout or 0)
        finally:  # locust's own patience ends at the same time
            self._running.kill()

    def wait_time(self) -> float:
        """Closed loop: none. Open loop: until the next request is due."""
        rate = self.chosen.arrival_rate / max(1, self.environment.runner.target_user_count)
        if not rate:
            return 0.0
        self._due += _random.expovariate(rate)
        return max(0.0, self._due - time.perf_counter())

    @task
    def response(self) -> None:
        """One response: waits for its end in a closed loop only."""
        if not self.chosen.arrival_rate:
            self._respond(Timing())
        elif len(self._running) < self.chosen.most_open:
            self._running.spawn(self._respond, Timing(started=self._due))
        else:
            self._report(Timing(error=f"not sent: {self.chosen.most_open} requests run already (--most-open)"))

    def _respond(self, timing: Timing) -> None:
        try:
            self._report(self.send(next(_prompts), timing))
        except gevent.GreenletExit:
            if patience_s := self.environment.stop_timeout:
                timing.error = f"hung: no end within {patience_s:g} s after the last request (--stop-timeout)"
                self._report(timing)
            raise

    def send(self, prompt: str, timing: Timing) -> Timing:
        raise NotImplementedError

    def _report(self, timing: Timing) -> None:
        _timings.append(timing)
        failure = RuntimeError(timing.error) if timing.error else None
        self._fire("response", time.perf_counter() - timing.started, timing.tokens, failure)
        self._fire("time to first token", timing.time_to_first_token_s)
        self._fire("inter-token time", timing.inter_token_s)
        self._fire("longest gap", timing.longest_gap_s if timing.tokens else math.nan)

    def _fire(self, name: str, seconds: float, length: int = 0, failure: Exception | None = None) -> None:
        if not math.isnan(seconds):
            self.environment.events.request.fire(
                request_type=self.protocol, name=name, response_time=1000.0 * seconds, response_length=length,
                exception=failure, context={},
            )  # fmt: skip


class GrpcStreamUser(_StreamingUser):
    """One gRPC stream per response, over one connection per user."""

    protocol = "gRPC"

    def on_start(self) -> None:
        super().on_start()
        self._channel = open_channel(self.chosen.url)

    def on_stop(self) -> None:
        super().on_stop()
        self._channel.close()

    def send(self, prompt: str, timing: Timing) -> Timing:
        request = request_bytes(self.chosen.model, prompt, outputs=_OUTPUTS, **self.fields)
        return over_grpc(self._channel, request, timing, timeout_s=self.chosen.request_timeout)


class HttpStreamUser(_StreamingUser):
    """Server-sent events of generate_stream; connections are used again."""

    protocol = "HTTP"

    def on_start(self) -> None:
        super().on_start()
        self._idle: list[HTTPConnection] = []

    def send(self, prompt: str, timing: Timing) -> Timing:
        body = json.dumps({"text_input": prompt, "stream": True, **self.fields}).encode()
        timeout_s = self.chosen.request_timeout
        connection = self._idle.pop() if self._idle else HTTPConnection(self.chosen.http_url, timeout=timeout_s)
        with gevent.Timeout(timeout_s, TimeoutError("the response did not end in time")):
            over_http(connection, self.chosen.model, body, timing)
        self._idle.append(connection)
        return timing
