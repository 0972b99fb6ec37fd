"""A profile on the time grid: the closed queueing network that the chain and the sampler both walk.

A *station* serves one batch at a time. The models come first, in profile order. A hand-off delay adds one *link*
station for every pair of models with p_ij > 0: threshold 1, step time `handoff_ms`, every request goes on to j. Two
batches never meet on a link as long as the delay does not exceed the shortest step, so the extension is exact there,
and longer delays are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tools.dtmc.errors import ProfileError, ThresholdError
from tools.dtmc.profile import Profile

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """N requests circulating over S stations, the first M of which are models.

    Attributes:
        names: the M model names.
        inflight: N, requests in flight.
        routing: [S, S] probability of going from the row's station to the column's after a step.
        commit: [S] mean tokens that one request commits in a completed step, sum_j p_ij c_ij.
        ticks: [S, N+1] step time of a batch of that size, in ticks; column 0 is 0.
        max_batch: [S] largest batch, at most N.
        entry: station where all requests wait at first.
        tick_ms: length of one tick. All step times are multiples of it; `delta_ms`, or a multiple of that.
    """

    names: tuple[str, ...]
    inflight: int
    routing: Floats
    commit: Floats
    ticks: Ints
    max_batch: Ints
    entry: int
    tick_ms: float

    @property
    def stations(self) -> int:
        """S, models and links."""
        return len(self.routing)

    @property
    def models(self) -> int:
        """M, models only."""
        return len(self.names)

    def threshold_vector(self, thresholds: Mapping[str, int]) -> tuple[int, ...]:
        """The thresholds in model order, checked.

        Feasible is sum_i (B_i - 1) < N (section 3.5): then some model has its threshold of ready requests whenever all
        are idle. All requests ready at one idle model are N >= B_i, so the server's all-ready rule never fires earlier
        than the threshold does, and the chain needs no such rule.
        """
        if unknown := sorted(thresholds.keys() - set(self.names)):
            raise ThresholdError(f"thresholds: no model {unknown[0]!r}; the models are {', '.join(self.names)}")
        if missing := sorted(set(self.names) - thresholds.keys()):
            raise ThresholdError(f"thresholds: {missing[0]} is missing; give one per model, e.g. {missing[0]}=1")
        for name, limit in zip(self.names, self.max_batch, strict=False):
            if not 1 <= thresholds[name] <= limit:
                raise ThresholdError(
                    f"thresholds: {name}={thresholds[name]}; give 1..{limit} (requests in flight, maximum batch)"
                )
        if (slack := sum(b - 1 for b in thresholds.values())) >= self.inflight:
            raise ThresholdError(
                f"thresholds: sum of (B - 1) is {slack}, which can deadlock with {self.inflight} in flight; "
                f"lower them until it is at most {self.inflight - 1}"
            )
        return tuple(thresholds[name] for name in self.names)


def parse_counts(text: str, option: str) -> dict[str, int]:
    """Parses `small=1,large=3`, what an option of a command says.

    Raises:
        ThresholdError: it does not have that form, or names a model twice.
    """
    counts: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = (piece.strip() for piece in part.partition("="))
        if not name or not number.isdecimal():
            raise ThresholdError(f"{option}: {part.strip()!r} is not MODEL=NUMBER; write e.g. small=1,large=3")
        if name in counts:
            raise ThresholdError(f"{option}: {name} is given twice; give each model once")
        counts[name] = int(number)
    return counts


def build_network(profile: Profile, inflight: int) -> Network:
    """Puts a profile with `inflight` requests on the time grid.

    Step times are rounded to the nearest multiple of `delta_ms`; the grid is then coarsened to the greatest common
    divisor of all times, which changes nothing but the number of states.

    Raises:
        ProfileError: a time is shorter than half of `delta_ms`, or the hand-off is longer than the shortest step.
    """
    if inflight < 1:
        raise ThresholdError(f"inflight: {inflight}; give 1 or more requests")
    routing = np.array(profile.routing_matrix)
    commit = (routing * np.array(profile.commit_matrix)).sum(axis=1)
    model_ticks = _step_ticks(profile, inflight, _extended_tokens_per_step(routing, commit, profile))
    routing, commit, ticks = _add_links(profile, routing, commit, model_ticks)
    common = int(np.gcd.reduce(ticks[:, 1:], axis=None))
    limits = [min(inflight, model.max_batch or inflight) for model in profile.models.values()]
    limits += [inflight] * (len(routing) - len(limits))
    return Network(
        names=profile.names,
        inflight=inflight,
        routing=routing,
        commit=commit,
        ticks=ticks // common,
        max_batch=np.array(limits),
        entry=profile.names.index(profile.entry),
        tick_ms=profile.delta_ms * common,
    )


def _extended_tokens_per_step(routing: Floats, commit: Floats, profile: Profile) -> Floats:
    """[M] mean extended tokens per request and step, beyond the one input token of any step.

    Every committed token is taken in once by every model, so model i takes in (tokens per step) / (share of steps at i)
    per step of its own. The chain has no memory of suffix lengths, hence the mean.
    """
    share = routing_shares(routing, profile.names.index(profile.entry))
    visited = share > 1e-12
    per_step = np.divide(share @ commit, share, out=np.ones_like(share), where=visited)
    return np.maximum(per_step - 1.0, 0.0)


def routing_shares(routing: Floats, entry: int) -> Floats:
    """[M] long-run share of a request's steps at each model."""
    start = np.zeros(len(routing))
    start[entry] = 1.0
    # The resolvent of a slightly discounted walk: also right for periodic routing and for transient models.
    discount = 1e-9
    share: Floats = discount * np.linalg.solve((np.eye(len(routing)) - (1 - discount) * routing).T, start)
    share /= share.sum()
    return share


def _step_ticks(profile: Profile, inflight: int, extended: Floats) -> Ints:
    ticks = np.zeros((len(profile.models), inflight + 1), dtype=np.int64)
    for i, (name, model) in enumerate(profile.models.items()):
        for batch in range(1, inflight + 1):
            time_ms = model.step_time_ms(batch, float(extended[i]) * batch)
            ticks[i, batch] = _to_ticks(f"models.{name}.step_ms", time_ms, profile.delta_ms)
    return ticks


def _to_ticks(field: str, time_ms: float, delta_ms: float) -> int:
    ticks = round(time_ms / delta_ms)
    if ticks < 1:
        raise ProfileError(f"{field}: {time_ms:g} ms vanishes on a grid of {delta_ms:g} ms; lower delta_ms")
    return ticks


def _add_links(profile: Profile, routing: Floats, commit: Floats, ticks: Ints) -> tuple[Floats, Floats, Ints]:
    """Inserts one link station per used pair of models, if hand-offs take time."""
    if profile.handoff_ms == 0:
        return routing, commit, ticks
    delay = _to_ticks("handoff_ms", profile.handoff_ms, profile.delta_ms)
    if delay > (shortest := int(ticks[:, 1:].min())):
        raise ProfileError(
            f"handoff_ms: {profile.handoff_ms:g} ms is longer than the shortest step "
            f"({shortest * profile.delta_ms:g} ms), which this model cannot represent; use the simulator"
        )
    models = len(routing)
    pairs = [(i, j) for i in range(models) for j in range(models) if i != j and routing[i, j] > 0]
    wide = np.zeros((models + len(pairs),) * 2)
    wide[:models, :models] = np.diag(np.diag(routing))
    for link, (i, j) in enumerate(pairs, start=models):
        wide[i, link], wide[link, j] = routing[i, j], 1.0
    link_ticks = np.full((len(pairs), ticks.shape[1]), delay)
    link_ticks[:, 0] = 0
    return wide, np.concatenate([commit, np.zeros(len(pairs))]), np.vstack([ticks, link_ticks])
