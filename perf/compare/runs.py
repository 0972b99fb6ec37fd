"""The same load through a server and through standard serving; `baselines.inprocess` is the third way."""

from __future__ import annotations

import time
from itertools import count

from perf.baselines.standard import StandardServing
from perf.compare.cells import System
from perf.load.requests import Load, Response, Run
from perf.load.timing import percentiles_ms
from tokenrouter.request import RequestFields
from tools.load import ClosedLoop, request_bytes

PERCENTILES = (50, 95, 99)
_OUTPUTS = ("output_ids", "finish_reason")
# Standard serving runs for a time that is set before; whole responses should end in it.
_SPARE = 2.0


def served(url: str, system: System, load: Load) -> Run:
    """A load through a server: its entry model, or the subserver that the system calls directly.

    Raises:
        LoadError: a request failed.
    """
    fields = {"speculation": True} if system.ahead else {}

    def request(number: int) -> bytes:
        asked = load.request(number)
        return request_bytes(
            system.model or "tokenrouter", asked.input_ids, max_tokens=asked.max_tokens, request_id=str(number),
            outputs=_OUTPUTS, seed=asked.seed, **fields,
        )  # fmt: skip

    with ClosedLoop(url, request, load.in_flight, keep=True) as loop:
        next(passed for passed in loop.ticks() if load.over(passed, loop.finished - load.in_flight))
        end_s = time.perf_counter()
    responses = [Response(request=load.request(i), started=sent_s) for i, sent_s in enumerate(loop.sent_s)]
    for number, at_s, tensors in loop.messages():
        responses[number].arrived(at_s, tensors["output_ids"].ravel().tolist())
        responses[number].ended |= "finish_reason" in tensors
    return Run(responses, loop.sent_s[0] + load.warm_up_s, end_s)


def standard(serving: StandardServing, load: Load, tokens_per_second: float) -> Run:
    """A load through standard serving; its rate without overhead says how long whole responses take.

    Args:
        serving: the running baseline.
        load: see `Load`.
        tokens_per_second: of the same engines without overhead.
    """
    response_s = load.response_tokens * load.in_flight / tokens_per_second
    seconds = load.warm_up_s + min(load.longest_s, max(load.seconds, _SPARE * response_s))
    requests = (load.request(index) for index in count())
    fields = (RequestFields(input_ids=r.input_ids, max_tokens=r.max_tokens, seed=r.seed) for r in requests)
    found = serving.run(fields, in_flight=load.in_flight, seconds=seconds)
    responses = [
        Response(
            request=load.request(r.index), started=r.started, times=r.times, counts=r.counts, ids=r.ids,
            ended=bool(r.finish_reason),
        )
        for r in found.responses
    ]  # fmt: skip
    return Run(responses, found.start_s + load.warm_up_s, found.end_s)


def summarise(run: Run) -> dict[str, float]:
    """Columns of the file: tokens per second in the window, and latencies in ms.

    Latencies are of whole responses that ended in the window: `ttft` from sending to the first token, `itl` between a
    token and the next of the same response (0 for tokens that came together), `e2e` from sending to the last token.
    """
    ended = [r for r in run.responses if r.ended and r.request.whole and run.start_s <= r.times[-1] < run.end_s]
    seconds = {
        "ttft": [r.time_to_first_token_s for r in ended],
        "itl": [gap for r in ended for gap in r.gaps_s],
        "e2e": [r.latency_s for r in ended],
    }
    return {
        "tokens_per_second": run.tokens_per_second,
        "responses": len(ended),
        **{
            f"{name}_{part}_ms": value
            for name, values in seconds.items()
            for part, value in percentiles_ms(values, PERCENTILES).items()
        },
    }
