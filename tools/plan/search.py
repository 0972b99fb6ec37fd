"""The smallest deployment that holds the objectives.

Replicas are added in proportion until the objectives hold, then taken away model by model, the most expensive first,
as long as they still hold; then it is asked whether thresholds save replicas, or more of a cheap model some of an
expensive one. What is found on few requests, and on a small slice of a large fleet, is confirmed on many and a larger
slice, together with the next smaller deployments. What does not hold there grows, by twice as much each time, and is
trimmed again; what holds smaller shrinks; until it holds and none of those does. All of them see the same requests, so
that they differ by themselves and not by luck. Numbers above `FINE` are found within 2 %.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tools.dtmc.profile import Profile
from tools.errors import CommandError
from tools.plan.bounds import least_replicas
from tools.plan.candidate import SHARES, UNLIMITED, Candidate, cost
from tools.plan.demand import Demand, Objectives
from tools.plan.evaluate import CONFIRMED, TRIED, Prediction
from tools.plan.pool import Pool
from tools.progress import Report, silent
from tools.simulate.run import simulate

FINE = 50
ROUGH_REQUESTS = 500
FINAL_REQUESTS = 2000
MOST_REPLICAS = 20_000
_GROWTH = 1.5
_FEW_TOKENS = 3000
_MOST_ROUNDS = 12


@dataclass(frozen=True)
class Plan:
    """What was found.

    Attributes:
        chosen: the deployment.
        prediction: of it, on `FINAL_REQUESTS`.
        smaller: the next smaller deployments, one per model that has more than one replica, with what each would do.
        cost: per hour.
        evaluated: how many deployments were simulated.
    """

    chosen: Candidate
    prediction: Prediction
    smaller: dict[Candidate, Prediction]
    cost: float
    evaluated: int


class Planner:
    """Searches; see the module's text.

    Args:
        profile: of one replica of each model.
        demand: the requests.
        objectives: what has to hold.
        prices: of a replica, by model.
        pool: evaluates.
        rough, final: requests on which a deployment is tried, and confirmed.
        report: told how far it is.
    """

    def __init__(
        self,
        profile: Profile,
        demand: Demand,
        objectives: Objectives,
        prices: Mapping[str, float],
        pool: Pool,
        *,
        rough: int = ROUGH_REQUESTS,
        final: int = FINAL_REQUESTS,
        report: Report = silent,
    ) -> None:
        self._profile, self._demand, self._objectives, self._prices = profile, demand, objectives, prices
        self._pool, self._rough, self._final, self._report = pool, rough, final, report
        self._least = least_replicas(profile, demand)
        self._by_price = sorted(range(len(profile.names)), key=lambda i: -prices[profile.names[i]])

    def plan(self) -> Plan:
        """The smallest deployment that was found.

        Raises:
            CommandError: no number of replicas holds the objectives.
        """
        self._refuse_impossible()
        found = self._trimmed(self._enough())
        found = self._exchanged(found)
        found = self._with_thresholds(found)
        chosen, smaller = self._confirmed(found)
        prediction = self._pool.seen[chosen, self._final]
        # As many as were seen, and some more, may run; a server has to be given a number.
        peak = prediction.peak_in_flight
        allowed = replace(chosen, max_inflight=min(self._kv_allows(chosen), math.ceil(1.25 * peak)))
        limited = self._in_full([allowed])[allowed]
        if limited.holds:
            chosen, prediction = allowed, limited
        else:
            chosen = replace(chosen, max_inflight=min(self._kv_allows(chosen), 4 * peak))
        return Plan(chosen, prediction, smaller, self._cost(chosen), len({each for each, _ in self._pool.seen}))

    # --- stages -----------------------------------------------------------------------------------------------------

    def _refuse_impossible(self) -> None:
        """Raises CommandError if a request of mean length does not fit, or misses the objectives when no other runs."""
        tokens = round(self._demand.mean_prompt + self._demand.mean_output)
        for name, model in self._profile.models.items():
            if model.kv_tokens is not None and model.kv_tokens < tokens:
                raise CommandError(
                    f"models.{name}.kv_tokens is {model.kv_tokens}; a request has {tokens} tokens in the mean: give a "
                    "replica more, or plan for shorter requests"
                )
        self._tell("one request alone", 0.0)
        alone = simulate(
            self._profile,
            inflight=1,
            response_tokens=self._demand.mean_output,
            prompt_tokens=max(1, round(self._demand.mean_prompt)),
            tokens=_FEW_TOKENS,
            warmup=0.0,
        )
        for option, latency, limit in (
            ("--ttft-p99-ms", alone.time_to_first_token_ms, self._objectives.ttft_p99_ms),
            ("--itl-p99-ms", alone.inter_token_ms, self._objectives.itl_p99_ms),
        ):
            if latency.p99 is not None and latency.p99 > limit:
                raise CommandError(
                    f"{option} {limit:g}: no number of replicas holds it; one request alone has {latency.p99:.1f} ms"
                )

    def _enough(self) -> Candidate:
        """Replicas in the proportion of the least that are needed, more and more until they suffice."""
        return self._first(
            Candidate(tuple(math.ceil(_GROWTH**step * least) for least in self._least)) for step in itertools.count()
        )

    def _first(self, growing: Iterable[Candidate], *, full: bool = False) -> Candidate:
        """The first that holds; as many at a time are tried as there are cores."""
        growing = iter(growing)
        while True:
            tried = list(itertools.islice(growing, self._pool.workers))
            if max(tried[0].replicas) > MOST_REPLICAS:
                raise CommandError(
                    f"--rate {self._demand.rate:g}: not even {MOST_REPLICAS} replicas of a model hold the objectives; "
                    "raise --ttft-p99-ms or --itl-p99-ms"
                )
            holds = self._holds(tried, full=full)
            if enough := [each for each in tried if holds[each]]:
                return enough[0]

    def _trimmed(self, candidate: Candidate) -> Candidate:
        """As few replicas of each model as still suffice with the others given, the most expensive model first."""
        for place in self._by_price:
            too_few = min(self._least[place], candidate.replicas[place]) - 1
            candidate = self._fewest(candidate, place, too_few)
        return candidate

    def _fewest(self, candidate: Candidate, place: int, too_few: int, *, full: bool = False) -> Candidate:
        """Of one model; `candidate` suffices."""
        enough = candidate.replicas[place]
        while enough - too_few > _step(enough):
            inner = self._pool.workers
            points = sorted({too_few + (enough - too_few) * (i + 1) // (inner + 1) for i in range(inner)} - {too_few})
            points = points or [enough - 1]
            holds = self._holds([candidate.with_replicas(place, count) for count in points], full=full)
            for count in points:
                if holds[candidate.with_replicas(place, count)]:
                    enough = count
                    break
                too_few = count
        return candidate.with_replicas(place, enough)

    def _exchanged(self, candidate: Candidate) -> Candidate:
        """Whether half as many again of a cheaper model save more of the others than they cost."""
        for place in reversed(self._by_price[1:]):
            count = candidate.replicas[place]
            more = candidate.with_replicas(place, count + max(1, count // 2))
            dearest = self._by_price[0]
            fewer = more.with_replicas(dearest, more.replicas[dearest] - _step(more.replicas[dearest]))
            if fewer.replicas[dearest] < 1 or not self._holds([fewer])[fewer]:
                continue
            other = self._trimmed(fewer)
            if self._cost(other) < self._cost(candidate):
                candidate = other
        return candidate

    def _with_thresholds(self, candidate: Candidate) -> Candidate:
        """Whether delayed batching saves replicas."""
        for share in SHARES[1:]:
            tried = [replace(each, share=share) for each in self._smaller(candidate)]
            holds = self._holds(tried)
            better = [each for each in tried if holds[each]]
            if better:
                candidate = self._trimmed(min(better, key=self._cost))
        return candidate

    def _confirmed(self, candidate: Candidate) -> tuple[Candidate, dict[Candidate, Prediction]]:
        """Grows or shrinks until it holds on many requests and no next smaller one does."""
        failed: set[Candidate] = set()
        for done in range(_MOST_ROUNDS):
            self._tell(f"confirming {self._name(candidate)}", done / _MOST_ROUNDS)
            smaller = list(self._smaller(candidate))
            found = self._in_full([candidate, *smaller])
            if not found[candidate].holds:
                failed.add(candidate)
                candidate = self._grown(candidate)
                continue
            better = [each for each in smaller if found[each].holds and each not in failed]
            if not better:
                return candidate, {each: found[each] for each in smaller}
            candidate = min(better, key=self._cost)
        raise CommandError("the search does not end: the objectives lie within the noise; change one of them a little")

    def _grown(self, candidate: Candidate) -> Candidate:
        """A larger one that holds on many requests: first more of all models, then what is not needed goes again."""
        enough = self._first(
            (
                replace(candidate, replicas=tuple(each + 2**times * _step(each) for each in candidate.replicas))
                for times in itertools.count()
            ),
            full=True,
        )
        for place in self._by_price:
            enough = self._fewest(enough, place, candidate.replicas[place], full=True)
        return enough

    # --- what they share --------------------------------------------------------------------------------------------

    def _smaller(self, candidate: Candidate) -> Iterator[Candidate]:
        for place, count in enumerate(candidate.replicas):
            if count > 1:
                yield candidate.with_replicas(place, count - _step(count))

    def _holds(self, candidates: Sequence[Candidate], *, full: bool = False) -> dict[Candidate, bool]:
        """Whether they do, on few requests, or on as many as confirm a deployment."""
        self._tell(f"trying {', '.join(map(self._name, candidates))}", 0.0)
        requests, least = (self._final, CONFIRMED) if full else (self._rough, TRIED)
        found = self._pool.predict(candidates, requests, least=least)
        return {each: one.holds for each, one in found.items()}

    def _in_full(self, candidates: Sequence[Candidate]) -> dict[Candidate, Prediction]:
        """What they do on as many requests as confirm a deployment."""
        return self._pool.predict(candidates, self._final, least=CONFIRMED, to_the_end=True)

    def _kv_allows(self, candidate: Candidate) -> int:
        """Requests of mean length for whose KV all replicas of each model have room."""
        tokens = self._demand.mean_prompt + self._demand.mean_output
        limits = [model.kv_tokens and int(model.kv_tokens // tokens) for model in self._profile.models.values()]
        found = [count * limit for count, limit in zip(candidate.replicas, limits, strict=True) if limit is not None]
        return max(1, min(found, default=UNLIMITED))

    def _cost(self, candidate: Candidate) -> float:
        return cost(candidate, self._profile, self._prices)

    def _name(self, candidate: Candidate) -> str:
        models = zip(candidate.replicas, self._profile.names, strict=True)
        return " + ".join(f"{count} {name}" for count, name in models)

    def _tell(self, stage: str, share: float) -> None:
        self._report(f"{stage} ({len(self._pool.seen)} simulated)", share)


def _step(count: int) -> int:
    """By how much numbers of this size are told apart."""
    return max(1, count // FINE)
