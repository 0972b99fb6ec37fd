"""One simulation from beginning to end."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from tokenrouter.speculation import Speculation
from tokenrouter.timeline.machines import MachineRecorder
from tokenrouter.timeline.recording import Recording
from tools.dtmc.errors import ThresholdError
from tools.dtmc.profile import Profile
from tools.simulate.deployment import PEER_NAME, Replicas, Thresholds, build_deployment
from tools.simulate.engine import nanoseconds
from tools.simulate.load import Clients, Load, Shape
from tools.simulate.loop import EventLoop, OnStep
from tools.simulate.meter import Meter
from tools.simulate.result import SimulationResult, result_of

SEGMENTS = 60
"""Parts of a run whose spread gives the standard error."""

DEFAULT_TOKENS = 20_000
DEFAULT_WARMUP = 0.1

Progress = Callable[[float], None]
OnRecording = Callable[[list[Recording]], None]


def simulate(
    profile: Profile,
    *,
    inflight: int,
    thresholds: Thresholds | None = None,
    tokens: int | None = None,
    seconds: float | None = None,
    warmup: float = DEFAULT_WARMUP,
    seed: int = 0,
    rate: float | None = None,
    response_tokens: float | None = None,
    shape: Shape = "fixed",
    prompt_tokens: int = 1,
    max_queue_delay_ms: float | None = None,
    think_ms: float = 0.0,
    speculation: Speculation | None = None,
    agreement: float = 1.0,
    replicas: Replicas | None = None,
    on_step: OnStep | None = None,
    on_recording: OnRecording | None = None,
    progress: Progress | None = None,
) -> SimulationResult:
    """Simulates a deployment: the production orchestrator and subservers, with the profile's step times.

    The closed loop keeps `inflight` requests in flight. By default responses never end, as in the Markov model, so
    that both give the same numbers; with `response_tokens` another request starts at once when one ends.

    Args:
        inflight: requests in flight; in the open loop, the most that are admitted at once.
        thresholds: per model B, or a table from requests in flight to B; models left out are eager (1).
        tokens: committed tokens to count; default 20,000 if `seconds` is not given either.
        seconds: simulated time to count instead.
        warmup: share of that length that runs before counting starts.
        rate: open loop: arrivals per second (Poisson); needs `response_tokens`.
        shape: whether responses all have that length, or geometric lengths.
        max_queue_delay_ms: longest wait for a threshold; None is no limit. In the open loop a threshold above 1
            needs one, since few requests in flight may never reach it.
        think_ms: closed loop: time from the end of a response to the next request of that client.
        speculation: how far the first of two models goes ahead of the second; None is plain routing.
        agreement: how often the second one writes the token that the first one would have written.
        replicas: how many there are of each model, left out 1; thresholds are those of one replica. With
            `response_tokens` each has the `kv_tokens` of the profile.
        on_step: told every step when it starts, warm-up included.
        on_recording: told what the models and their requests did, as a server tells it, warm-up included.
        progress: told the share of the run that is done, in 0..1.

    Raises:
        ProfileError: a move commits neither 0 nor 1 tokens, or the profile allows no speculation.
        ThresholdError: unknown model, out of range, or a deadlock.
        ValueError: another argument is out of range.
    """
    load = Load(inflight, rate, response_tokens, shape, prompt_tokens, seed)
    goal = _Goal(tokens if seconds is not None or tokens is not None else DEFAULT_TOKENS, seconds)
    if not warmup >= 0:
        raise ValueError(f"warmup: {warmup:g}; give a share of 0 or more")
    if not 0.0 <= agreement <= 1.0:
        raise ValueError(f"agreement: {agreement:g}; give a share in [0, 1]")
    _check_thresholds(thresholds or {}, replicas or {}, load, max_queue_delay_ms)
    deployment = build_deployment(
        profile,
        max_inflight=inflight,
        thresholds=thresholds or {},
        max_queue_delay_ns=None if max_queue_delay_ms is None else nanoseconds(max_queue_delay_ms),
        speculation=speculation,
        agreement=agreement,
        replicas=replicas,
        limited_kv=response_tokens is not None,
    )
    streams = speculation is not None
    recorder = None
    if on_recording is not None:
        recorder = MachineRecorder(deployment.orchestrator, deployment.subservers, name=PEER_NAME, now_ns=0)
    loop = EventLoop(
        deployment,
        Clients(load, deployment.policy, stream=streams),
        inflight=inflight if rate is None else None,
        handoff_ns=nanoseconds(profile.handoff_ms),
        think_ns=nanoseconds(think_ms),
        streams=streams,
        on_step=on_step,
    )
    with collector_paused():
        handoffs = _run(loop, goal, warmup, progress or (lambda share: None))
    if on_recording is not None and recorder is not None:
        on_recording(recorder.stop(now_ns=loop.now_ns))
    return result_of(
        loop.meter, profile, loop.now_ns, handoffs=handoffs, controls=response_tokens is None and not streams
    )


@contextmanager
def collector_paused() -> Iterator[None]:
    """Nothing is cyclic in a simulation, and with 10,000 requests the cycle collector takes a third of the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@dataclass(frozen=True, slots=True)
class _Goal:
    """How long a run is: by tokens or by time."""

    tokens: int | None
    seconds: float | None

    def __post_init__(self) -> None:
        if (self.tokens is None) == (self.seconds is None):
            raise ValueError("give tokens or seconds, not both")
        if not (self.tokens or self.seconds or 0) > 0:
            raise ValueError("tokens and seconds are above 0")

    def reached(self, meter: Meter, now_ns: int, share: float) -> bool:
        """Whether this share of the run is over."""
        if self.tokens is not None:
            return meter.tokens >= share * self.tokens
        return now_ns - meter.start_ns >= share * (self.seconds or 0.0) * 1e9


def _run(loop: EventLoop, goal: _Goal, warmup: float, progress: Progress) -> int:
    """Runs to the goal. Returns the hand-offs of the counted part."""
    while warmup and not goal.reached(loop.meter, loop.now_ns, warmup):
        loop.advance()
    loop.meter.reset(loop.now_ns)
    before = loop.orchestrator.statistics.handoffs
    for segment in range(1, SEGMENTS + 1):
        share = segment / SEGMENTS
        while not goal.reached(loop.meter, loop.now_ns, share):
            loop.advance()
        loop.meter.cut(loop.now_ns)
        progress(share)
    return loop.orchestrator.statistics.handoffs - before


def throughput(
    profile: Profile,
    inflight: int,
    thresholds: Thresholds,
    *,
    speculation: Speculation | None = None,
    agreement: float = 1.0,
) -> float:
    """Tokens per second in the closed loop with endless responses; without speculation, what the Markov model has."""
    found = simulate(profile, inflight=inflight, thresholds=thresholds, speculation=speculation, agreement=agreement)
    return found.adjusted_tokens_per_second


def _check_thresholds(thresholds: Thresholds, replicas: Replicas, load: Load, max_queue_delay_ms: float | None) -> None:
    if max_queue_delay_ms is not None:
        if not max_queue_delay_ms >= 0:
            raise ValueError(f"max_queue_delay_ms: {max_queue_delay_ms:g}; give 0 or more")
        return
    fixed = {name: b for name, b in thresholds.items() if isinstance(b, int)}
    slack = sum(replicas.get(name, 1) * (b - 1) for name, b in fixed.items())
    if load.rate is not None and slack:
        raise ThresholdError(
            "thresholds: with arrivals at a rate, few requests in flight may never reach a threshold above 1; "
            "set max_queue_delay_ms, or give tables from requests in flight to thresholds"
        )
    if load.rate is None and slack >= load.inflight:
        raise ThresholdError(
            f"thresholds: sum of (B - 1) is {slack}, which can deadlock with {load.inflight} in flight; "
            f"lower them until it is at most {load.inflight - 1}, or set max_queue_delay_ms"
        )
