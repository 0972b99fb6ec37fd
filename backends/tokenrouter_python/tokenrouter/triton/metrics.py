"""Publishes statistics on Triton's /metrics page."""

from __future__ import annotations

import logging
import time
from itertools import accumulate
from math import isfinite
from typing import TYPE_CHECKING, Any

import triton_python_backend_utils as pb_utils

from tokenrouter.errors import slugs
from tokenrouter.orchestrator.lifecycle import FINISH_REASONS
from tokenrouter.orchestrator.machine import Orchestrator
from tokenrouter.statistics import CacheStatistics, Histogram, StepTimes, SubserverStatistics

if TYPE_CHECKING:
    from tokenrouter.subserver.machine import Subserver

log = logging.getLogger(__name__)

_TAKEN = ("tokenrouter_statistics_seconds", "When this model's numbers were taken, on the host's monotonic clock")


class _Series:
    """Metric families and their series, made on first use; only changes are sent to Triton.

    What can be counted is published at 0 before it first happens, or a rate over it would miss the first time.

    Histograms are published as counters with cumulative `le` buckets: Triton's own histogram takes one call per
    observation, ours arrive in batches.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        self._labels = labels
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, tuple[tuple[str, str], ...]], Any] = {}
        self._last: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._refused: set[tuple[str, tuple[tuple[str, str], ...]]] = set()

    def release(self) -> None:
        """Gives everything back, series before their families: in another order Triton's stub crashes as it ends."""
        self._metrics.clear()
        self._families.clear()

    def gauge(self, name: str, description: str, value: float, **labels: str) -> None:
        self._publish(name, description, value, labels, pb_utils.MetricFamily.GAUGE)

    def counter(self, name: str, description: str, value: float, **labels: str) -> None:
        """Raises a counter to `value`."""
        self._publish(name, description, value, labels, pb_utils.MetricFamily.COUNTER)

    def histogram(self, name: str, description: str, value: Histogram, **labels: str) -> None:
        """Raises cumulative buckets, sum and count."""
        bounds = [*(f"{bound:g}" for bound in value.bounds), "+Inf"]
        for bound, count in zip(bounds, accumulate(value.counts), strict=True):
            self.counter(f"{name}_bucket", description, count, le=bound, **labels)
        self.counter(f"{name}_sum", description, value.total, **labels)
        self.counter(f"{name}_count", description, value.count, **labels)

    def _publish(self, name: str, description: str, value: float, labels: dict[str, str], kind: Any) -> None:
        labels = {**self._labels, **labels}
        key = (name, tuple(labels.items()))
        last = self._last.get(key)
        if last == value:
            return
        counts = kind == pb_utils.MetricFamily.COUNTER
        if not isfinite(value) or (counts and value < (last or 0.0)):
            # Triton would refuse it, and its stub reads freed memory for the reason: the process dies soon after.
            self._refuse(key, value)
            return
        metric = self._metrics.get(key)
        if metric is None:
            if name not in self._families:
                self._families[name] = pb_utils.MetricFamily(name=name, description=description, kind=kind)
            metric = self._metrics[key] = self._families[name].Metric(labels=labels)
        if counts:
            metric.increment(value - (last or 0.0))
        else:
            metric.set(value)
        self._last[key] = value

    def _refuse(self, key: tuple[str, tuple[tuple[str, str], ...]], value: float) -> None:
        """Says so once for each series."""
        if key not in self._refused:
            self._refused.add(key)
            log.error("%s%s would become %r, which is no value for it; it keeps its last one", *key, value)


class SubserverMetrics:
    """Series of one subserver, labelled with its model."""

    def __init__(self, model: str) -> None:
        self._series = _Series({"model": model})

    def release(self) -> None:
        """Nothing may be published any more."""
        self._series.release()

    def publish(self, subserver: Subserver) -> None:
        taken_s = time.monotonic()
        series, engine, numbers = self._series, subserver.engine, subserver.statistics
        series.gauge("tokenrouter_kv_blocks", "KV blocks in the pool", engine.info.kv_blocks)
        series.gauge("tokenrouter_kv_blocks_reserved", "KV blocks leased to open requests", engine.blocks_leased)
        series.gauge("tokenrouter_kv_blocks_used", "KV blocks that hold tokens", engine.blocks_used)
        series.gauge("tokenrouter_max_batch", "Most requests in one step", engine.info.max_batch)
        series.gauge("tokenrouter_open_requests", "Requests that hold KV at the model", subserver.open_sequences)
        series.gauge("tokenrouter_residents", "Requests that decode at the model", subserver.residents)
        series.gauge("tokenrouter_model_in_flight", "Requests in flight as the model knows", subserver.in_flight)
        series.gauge("tokenrouter_batch_threshold", "Threshold of delayed batching in force", subserver.threshold)
        for n, threshold in subserver.batching.by_in_flight.items():
            label = {"in_flight": str(n)}
            series.gauge("tokenrouter_batch_threshold_from", "Threshold from so many in flight on", threshold, **label)
        series.counter("tokenrouter_visits", "Visits begun", numbers.visits)
        series.counter("tokenrouter_handoffs_in", "Requests handed to the model", numbers.handoffs_in)
        series.counter("tokenrouter_handoffs_out", "Requests handed away", numbers.handoffs_out)
        series.counter("tokenrouter_steps", "Engine steps", numbers.steps)
        for reason, count in numbers.steps_by_reason.items():
            series.counter("tokenrouter_steps_by_reason", "Engine steps by why they started", count, reason=reason)
        series.counter("tokenrouter_new_tokens", "Tokens run through the model", numbers.new_tokens)
        series.counter("tokenrouter_extended_tokens", "Tokens beyond one per request", numbers.extended_tokens)
        series.counter("tokenrouter_committed_tokens", "Tokens written by the model", numbers.committed_tokens)
        series.counter("tokenrouter_checks", "Rows of steps in which guesses were checked", numbers.checks)
        series.counter("tokenrouter_checked_positions", "Tokens that those decided", numbers.checked_positions)
        series.counter("tokenrouter_request_failures", "Requests failed at the model", numbers.failures)
        series.histogram("tokenrouter_batch_size", "Requests per step", numbers.batch_size)
        series.histogram("tokenrouter_ready_wait_seconds", "Wait from ready to step", numbers.ready_wait)
        series.histogram("tokenrouter_step_seconds", "Time of a step", numbers.step_time)
        series.histogram("tokenrouter_handoff_seconds", "Time from leaving one model to ready here", numbers.handoff)
        if numbers.cache is not None:
            self._cache(numbers.cache)
        self._routes(numbers, subserver.model)
        self._step_times(numbers.step_times)
        series.gauge(*_TAKEN, taken_s)

    def _cache(self, numbers: CacheStatistics) -> None:
        """What the cache of an engine that owns its loop kept, and what came of visits that were over."""
        for name, description, value in (
            ("cached_tokens", "Tokens of submissions found in the KV cache", numbers.cached_tokens),
            ("lost_prefixes", "Visits that found a block less than they had left", numbers.lost_prefixes),
            ("recomputed_tokens", "Tokens run again because the cache had lost them", numbers.recomputed_tokens),
            ("surplus_tokens", "Tokens of visits that were over, dropped", numbers.surplus_tokens),
        ):
            self._series.counter(f"tokenrouter_{name}", description, value)

    def _routes(self, numbers: SubserverStatistics, model: str) -> None:
        for (target, committed), count in list(numbers.routes.items()):
            labels = {"target": target or model, "committed": str(int(committed))}
            self._series.counter("tokenrouter_routes", "Where requests went after a step", count, **labels)

    def _step_times(self, times: StepTimes) -> None:
        """What the profiler fits, see `StepTimes`."""
        series = self._series
        for batch, sums in list(times.by_batch.items()):
            label = {"batch": str(batch)}
            series.counter("tokenrouter_batch_steps", "Steps of this batch size", sums.steps, **label)
            series.counter("tokenrouter_batch_step_seconds", "Their time", sums.seconds, **label)
            series.counter("tokenrouter_batch_extended_tokens", "Their extended tokens", sums.extended, **label)
        for name, description, value in (
            ("step_seconds_squared", "Sum over these steps of seconds squared", times.seconds_squared),
            ("step_extended_squared", "Sum over these steps of extended tokens squared", times.extended_squared),
            ("step_seconds_extended", "Sum over these steps of seconds times tokens", times.seconds_extended),
        ):
            series.counter(f"tokenrouter_{name}", description, value)


class OrchestratorMetrics:
    """Series of one orchestrator, labelled with the entry model. `policy` is the deployment's."""

    def __init__(self, model: str, orchestrator: Orchestrator, policy: str) -> None:
        self._policy = policy
        self._series = _Series({"model": model})
        self._orchestrator = orchestrator

    def release(self) -> None:
        """Nothing may be published any more."""
        self._series.release()

    def publish(self) -> None:
        taken_s = time.monotonic()
        series, orchestrator = self._series, self._orchestrator
        numbers = orchestrator.statistics
        series.gauge("tokenrouter_in_flight", "Requests that run", orchestrator.in_flight)
        series.gauge("tokenrouter_queued", "Requests that wait", orchestrator.queued)
        series.counter("tokenrouter_requests", "Requests accepted", numbers.accepted)
        series.counter("tokenrouter_stale_messages", "Messages of old visits, dropped", numbers.stale_messages)
        series.counter("tokenrouter_recovered", "Requests sent again to a model that lost them", numbers.recovered)
        series.counter("tokenrouter_handoffs", "Hand-offs relayed", numbers.handoffs)
        for reason in FINISH_REASONS.values():
            series.counter("tokenrouter_finished", "Requests finished", numbers.finished[reason], reason=reason)
        for slug in sorted(slugs()):
            series.counter("tokenrouter_failed", "Requests failed or refused", numbers.failed[slug], reason=slug)
        written = {(self._policy, name): 0 for name in orchestrator.settings.models} | dict(numbers.tokens)
        for (policy, writer), tokens in written.items():
            label = {"policy": policy, "writer": writer}
            series.counter(
                "tokenrouter_tokens", "Tokens committed, by policy and the model that wrote them", tokens, **label
            )
        series.counter("tokenrouter_moved", "Requests that went on at another replica", numbers.moved)
        for model, replicas in orchestrator.settings.all_replicas.items():
            for name in replicas:
                label = {"subserver": name}
                connected, pinned = int(orchestrator.is_connected(name)), orchestrator.pinned(name)
                blocks = orchestrator.reserved_blocks(name)
                series.gauge("tokenrouter_ledger_blocks", "KV blocks reserved in the ledger", blocks, **label)
                series.gauge("tokenrouter_pinned", "Running requests that are pinned to the replica", pinned, **label)
                series.gauge("tokenrouter_connected", "Whether the replica is", connected, **label, replica_of=model)
        self._agreement()
        series.histogram("tokenrouter_queue_seconds", "Wait from arrival to start", numbers.queue_wait)
        first, inter = numbers.time_to_first_token, numbers.inter_token
        series.histogram("tokenrouter_time_to_first_token_seconds", "From arrival to the first token", first)
        series.histogram("tokenrouter_inter_token_seconds", "Between two reports with tokens", inter)
        series.gauge(*_TAKEN, taken_s)

    def _agreement(self) -> None:
        """What became of guesses, by policy; of the deployment's own from the start."""
        series, speculation = self._series, self._orchestrator.speculation
        for policy, found in list(speculation.agreement.items()):
            label = {"policy": policy}
            for fate, value in (("confirmed", found.confirmed), ("rolled_back", found.rolled_back)):
                series.counter("tokenrouter_guesses", "Guesses by what became of them", value, **label, fate=fate)
            series.counter("tokenrouter_discarded_tokens", "Tokens discarded at a hand-off", found.compared, **label)
            series.counter("tokenrouter_agreed_tokens", "Those that the large model wrote too", found.agreed, **label)
            series.gauge("tokenrouter_agreement", "Their share, as a moving average", found.mean, **label)
