"""Thresholds of a deployment: searched for with a profile, and checked for deadlock."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from tokenrouter.batcher import Batching
from tokenrouter.errors import ConfigError
from tools.build_repository.spec import BatchingSpec, DeploymentSpec
from tools.dtmc.errors import DtmcError
from tools.dtmc.profile import Profile, load_profile

DELAY_ROUNDS = 2  # rounds, in each of which every model makes one step
DELAY_GRID_MICROSECONDS = 100


class Searched(Protocol):
    """Thresholds that a search found for one number in flight."""

    @property
    def inflight(self) -> int: ...

    @property
    def thresholds(self) -> dict[str, int]: ...


def tuned(spec: DeploymentSpec) -> DeploymentSpec:
    """The deployment with the thresholds that its profile gives; unchanged if it names none.

    Raises:
        ConfigError: the profile is not valid, or is of other models; or the deployment has thresholds already.
    """
    if spec.tuning is None:
        return spec
    profile = _profile(spec, Path(spec.tuning.profile))
    try:
        from tools.dtmc.search import search_table
    except ImportError as exc:  # scipy is no dependency of a server
        raise ConfigError(
            f"tuning: the search needs {exc.name}, which is not installed; install it, or search elsewhere (python -m "
            "tools.dtmc search --table) and write the thresholds into models.*.batching"
        ) from exc
    found = batching_of(profile, search_table(profile, spec.tuning.inflight))
    return replace(spec, models={name: replace(model, batching=found[name]) for name, model in spec.models.items()})


def _profile(spec: DeploymentSpec, path: Path) -> Profile:
    try:
        profile = load_profile(path)
    except DtmcError as exc:
        raise ConfigError(f"tuning.profile: {exc}") from exc
    if set(profile.names) != set(spec.models):
        raise ConfigError(
            f"tuning.profile: it is of the models {', '.join(profile.names)}, the deployment has "
            f"{', '.join(spec.models)}; use the same names"
        )
    for name, model in spec.models.items():
        if model.batching != BatchingSpec():
            raise ConfigError(f"models.{name}.batching and tuning exclude each other; remove one")
    return profile


def batching_of(profile: Profile, table: Sequence[Searched]) -> dict[str, BatchingSpec]:
    """The thresholds of every model, from a table of results up to n = N; B at N is what holds without the table."""
    most = max(row.inflight for row in table)
    delay = max_queue_delay_microseconds(profile, most)
    thresholds = {name: {row.inflight: row.thresholds[name] for row in table} for name in profile.names}
    return {name: BatchingSpec(by_inflight[most], delay, by_inflight) for name, by_inflight in thresholds.items()}


def max_queue_delay_microseconds(profile: Profile, inflight: int) -> int:
    """Upper limit of any wait, in microseconds.

    The limit is a way out of states the thresholds were not tuned for, not part of the rule that was tuned, so it must
    not cut the waits that the thresholds mean to have. A request waits for requests that are busy elsewhere, so the
    limit is the time of `DELAY_ROUNDS` rounds in which every model makes one step with all requests, and hands over.
    """
    steps = sum(model.step_time_ms(inflight) + profile.handoff_ms for model in profile.models.values())
    # Rounded before ceil: 67.8 ms must not become 67.9 by the last bit of a sum.
    cells = math.ceil(round(DELAY_ROUNDS * steps * 1000.0 / DELAY_GRID_MICROSECONDS, 6))
    return cells * DELAY_GRID_MICROSECONDS


def threshold_problems(spec: DeploymentSpec) -> Iterator[str]:
    """Thresholds that are no thresholds, that no batch can hold, or that can deadlock.

    Feasible is sum(B_i - 1) < n with n requests in flight (arXiv 2610.12242, section 3.5): otherwise all may wait, each
    model for one request more, until `max_queue_delay_microseconds` is over.
    """
    policies: dict[str, Batching] = {}
    for name, model in spec.models.items():
        batching = model.batching
        try:
            delay_ns = batching.max_queue_delay_microseconds * 1000
            policies[name] = Batching(batching.threshold, delay_ns, batching.batch_thresholds)
        except ConfigError as exc:
            yield f"models.{name}.batching: {exc}"
            continue
        highest = max([batching.threshold, *batching.batch_thresholds.values()])
        max_batch = model.options.get("max_batch_size")
        if isinstance(max_batch, int) and highest > max_batch:
            yield (
                f"models.{name}.batching: a threshold of {highest} is never reached with options.max_batch_size "
                f"{max_batch}; raise that, or lower the threshold"
            )
    if len(policies) < len(spec.models):
        return
    tables = {n for policy in policies.values() for n in policy.by_in_flight}
    for n in sorted({n for n in tables if n <= spec.entry.max_inflight} | {spec.entry.max_inflight}):
        # A replica knows the requests that are pinned to it, which are dealt out evenly.
        replicas = {name: spec.models[name].replicas for name in policies}
        pinned = {name: max(1, n // count) for name, count in replicas.items()}
        thresholds = {name: min(policy.threshold_at(pinned[name]), pinned[name]) for name, policy in policies.items()}
        if sum(replicas[name] * (threshold - 1) for name, threshold in thresholds.items()) >= n:
            given = ", ".join(f"{name}={threshold}" for name, threshold in thresholds.items())
            yield (
                f"models.*.batching: with {n} requests in flight the thresholds {given} can deadlock, since "
                f"sum(B - 1) is not below {n}; lower some, or raise entry.max_inflight"
            )
            return
