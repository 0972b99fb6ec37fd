"""The requests of a study at a server: sent when they are due, whether others are done or not."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tritonclient.grpc import service_pb2

from perf.plan.times import Times
from perf.serving.window import ENTRY
from tokenrouter.messages import PolicySpec
from tools.load import HANG_S, LoadError, Stream, request_bytes
from tools.plan.demand import Demand, Source

_POLL_S = 0.05


def requests_of(demand: Demand, *, count: int, seed: int) -> list[tuple[float, bytes]]:
    """When the first `count` requests are due, in seconds from the first one on, and their bytes."""
    source, due_s, found = Source(demand, PolicySpec("markov"), seed), 0.0, []
    for number in range(count):
        due_s += max(1, source.gap_ns()) * 1e-9
        request = source.request()
        prompt = [1] * len(request.tokens)
        most = request.sampling.max_tokens
        payload = request_bytes(
            ENTRY, prompt, max_tokens=most, request_id=str(number), seed=request.sampling.seed, min_tokens=most
        )
        found.append((due_s, payload))
    return found


def served_times(url: str, requests: Sequence[tuple[float, bytes]]) -> Times:
    """Sends them and notes when their messages come.

    Raises:
        LoadError: the server fails a request, or nothing comes any more.
    """
    stream = Stream(url, keep=True)
    sent = []
    try:
        began_s = time.perf_counter()
        for due_s, payload in requests:
            time.sleep(max(0.0, began_s + due_s - time.perf_counter()))
            sent.append(time.perf_counter())
            stream.send(payload)
        _wait(stream, len(requests))
    finally:
        stream.close()
    times = {number: [at_s] for number, at_s in enumerate(sent)}
    for at_s, payload in zip(stream.arrivals.times, stream.arrivals.payloads, strict=True):
        response = service_pb2.ModelStreamInferResponse.FromString(payload).infer_response
        if response.raw_output_contents:
            times[int(response.id)].append(at_s)
    return times


def _wait(stream: Stream, count: int) -> None:
    arrivals = stream.arrivals
    while arrivals.finished < count:
        if arrivals.errors:
            raise LoadError(arrivals.errors[0])
        if arrivals.times and time.perf_counter() - arrivals.times[-1] > HANG_S:
            raise LoadError(f"{count - arrivals.finished} requests hang: nothing came for {HANG_S:g} s")
        time.sleep(_POLL_S)
