"""What a simulation gives."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tools.dtmc.profile import Profile
from tools.simulate.meter import Meter

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Latency:
    """Distribution of a time in ms over `count` events; None everywhere if there was no event."""

    count: int
    mean: float | None
    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Long-run means over the counted part of a run; dicts are by model name, over all replicas together.

    The first six have the names and the meaning of `tools.dtmc.solve.Solution`.

    Attributes:
        tokens_per_second: committed tokens, all requests together.
        mean_tpot_ms: mean time per output token of one request, mean requests in flight / throughput (Little's law).
        mean_batch: requests per step.
        utilisation: share of time that a replica of the model is busy.
        mean_wait_ms: time from ready to the start of the step, per request and step; hand-off delay not included.
        standard_error: of `tokens_per_second`, from its spread over the segments of the run.
        adjusted_tokens_per_second: the same throughput with the luck of the routing draws taken out: how often each
            move was drawn more often than its probability says is regressed away (control variates). Equal to
            `tokens_per_second` when responses end, since the last move of a response is not seen.
        simulated_s: counted time, warm-up not included.
        peak_in_flight: most requests that ran at once.
        events: instants at which anything happened.
        time_to_first_token_ms: from arrival (queue included) to the report of the first token.
        inter_token_ms: between tokens of a response.
        end_to_end_ms: from arrival to the last token.
    """

    tokens_per_second: float
    mean_tpot_ms: float
    mean_batch: dict[str, float]
    utilisation: dict[str, float]
    mean_wait_ms: dict[str, float]
    standard_error: float
    adjusted_tokens_per_second: float
    adjusted_standard_error: float
    simulated_s: float
    tokens: int
    mean_in_flight: float
    peak_in_flight: int
    requests_finished: int
    events: int
    steps: dict[str, int]
    handoffs: int
    time_to_first_token_ms: Latency
    inter_token_ms: Latency
    end_to_end_ms: Latency


class _Sums:
    """What all replicas of one model did."""

    def __init__(self, meter: Meter, model: int, now_ns: int) -> None:
        own = [index for index, of in enumerate(meter.model_of) if of == model]
        counts = [meter.replicas[index] for index in own]
        self.replicas = len(own)
        self.busy_ns = sum(meter.busy_ns(index, now_ns) for index in own)
        self.steps = sum(each.steps for each in counts)
        self.requests = sum(each.requests for each in counts)
        self.started = sum(each.started for each in counts)
        self.wait_ns = sum(each.wait_ns for each in counts)


def result_of(meter: Meter, profile: Profile, now_ns: int, *, handoffs: int, controls: bool) -> SimulationResult:
    """Summarises a run that ends now; `controls`: whether every move of every request was seen."""
    elapsed_ns = now_ns - meter.start_ns
    segments = meter.segments()
    plain = estimate(segments[:, :2])
    extra = _luck(segments[:, 2:], profile) if controls else None
    adjusted = plain if extra is None else estimate(segments[:, :2], extra)
    named = {name: _Sums(meter, index, now_ns) for index, name in enumerate(profile.names)}
    return SimulationResult(
        tokens_per_second=plain[0],
        mean_tpot_ms=1e-6 * meter.in_flight_ns / meter.tokens,
        mean_batch={name: counts.requests / max(1, counts.steps) for name, counts in named.items()},
        utilisation={name: counts.busy_ns / counts.replicas / elapsed_ns for name, counts in named.items()},
        mean_wait_ms={name: 1e-6 * counts.wait_ns / max(1, counts.started) for name, counts in named.items()},
        standard_error=plain[1],
        adjusted_tokens_per_second=adjusted[0],
        adjusted_standard_error=adjusted[1],
        simulated_s=1e-9 * elapsed_ns,
        tokens=meter.tokens,
        mean_in_flight=meter.in_flight_ns / elapsed_ns,
        peak_in_flight=meter.peak_in_flight,
        requests_finished=meter.finished,
        events=meter.instants,
        steps={name: counts.steps for name, counts in named.items()},
        handoffs=handoffs,
        time_to_first_token_ms=_latency(meter.first_token_ns),
        inter_token_ms=_latency(meter.inter_token_ns),
        end_to_end_ms=_latency(meter.end_to_end_ns),
    )


def estimate(segments: Floats, controls: Floats | None = None) -> tuple[float, float]:
    """Tokens per second, and its standard error.

    A ratio estimate over segments; `controls` have mean 0, and what they explain of a segment is taken out.

    Args:
        segments: [K, 2] ns and tokens.
        controls: [K, C], fewer than K.
    """
    seconds, tokens = segments[:, 0] * 1e-9, segments[:, 1]
    rate = tokens.sum() / seconds.sum()
    if controls is not None and controls.shape[1]:
        weights = np.linalg.lstsq(controls, tokens - rate * seconds, rcond=None)[0]
        tokens = tokens - controls @ weights
        rate = tokens.sum() / seconds.sum()
    rest = tokens - rate * seconds
    free = len(rest) - 1 - (0 if controls is None else controls.shape[1])
    error = np.sqrt(len(rest) * (rest @ rest) / free) / seconds.sum() if free > 0 else np.inf
    return float(rate), float(error)


def _luck(moves: Floats, profile: Profile) -> Floats:
    """[K, C] moves drawn beyond their expectation; of every row of P all but the last possible move.

    Each is a sum of martingale differences, so its mean is 0 whatever the scheduler does.
    """
    models = len(profile.names)
    moves = moves.reshape(-1, models, models)
    columns = []
    for i, row in enumerate(profile.routing_matrix):
        total = moves[:, i].sum(axis=1)
        columns += [moves[:, i, j] - row[j] * total for j in [j for j in range(models) if row[j] > 0][:-1]]
    return np.stack(columns, axis=1) if columns else np.zeros((len(moves), 0))


def _latency(times_ns: array[int]) -> Latency:
    if not times_ns:
        return Latency(0, None, None, None, None)
    values = np.frombuffer(times_ns, dtype=np.int64) * 1e-6
    p50, p95, p99 = (float(value) for value in np.percentile(values, (50, 95, 99)))
    return Latency(len(values), float(values.mean()), p50, p95, p99)
