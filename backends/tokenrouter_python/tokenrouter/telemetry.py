"""Spans of requests that carry a W3C trace context, exported over OTLP/HTTP by OpenTelemetry's own SDK.

Off unless the standard variables name an endpoint; then nothing of the SDK is even imported. Spans are made of a
request's trail once it is over, in a thread of their own; where an export is slow or fails, spans are lost and requests
go on.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from tokenrouter.errors import ConfigError
from tokenrouter.timeline.trail import Trail

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

    from tokenrouter.orchestrator.generation import Generation

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
HEADERS = ("traceparent", "tracestate")
FINISHED = ("stop", "length", "timeout")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
# Requests whose spans are not made yet; more of them are lost.
_MOST_WAITING = 1024
_STOP_S = 3.0


def configured(environment: Mapping[str, str]) -> bool:
    """Whether an endpoint is named, and the SDK is not switched off."""
    wanted = any(environment.get(name) for name in ENDPOINTS)
    return wanted and environment.get("OTEL_SDK_DISABLED", "").lower() != "true"


def from_environment(model: str) -> Telemetry | None:
    """What exports the spans of a model's requests, if the environment names an endpoint.

    Raises:
        ConfigError: the SDK is not installed, or another protocol is asked for.
    """
    if not configured(os.environ):
        return None
    for name in _PROTOCOLS:
        if (protocol := os.environ.get(name, _PROTOCOL)) != _PROTOCOL:
            raise ConfigError(
                f"{name} is {protocol!r}: spans are exported over {_PROTOCOL}; give that, or leave it out"
            )
    try:
        return Telemetry(model)
    except ImportError as exc:
        raise ConfigError(f"an OTLP endpoint is set, but {exc.name} is missing: pip install tokenrouter[otel]") from exc


class Telemetry:
    """Exports spans to the endpoint that the environment names.

    Args:
        model: that takes the requests.
        processor: of spans; by default they are exported in batches.

    Raises:
        ImportError: the SDK is not installed.
    """

    def __init__(self, model: str, processor: SpanProcessor | None = None) -> None:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model = model
        self._trace = trace
        self._propagator = TraceContextTextMapPropagator()
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        self._provider = TracerProvider(resource=Resource.create({} if named else {"service.name": "tokenrouter"}))
        self._provider.add_span_processor(processor or BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("tokenrouter")
        self._over: queue.Queue[tuple[Any, Trail] | None] = queue.Queue(_MOST_WAITING)
        self._lost = 0
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._thread.start()

    def caller(self, traceparent: str, tracestate: str = "") -> Any:
        """The caller's span; None if the header is malformed or says that the trace is not sampled."""
        carrier = {"traceparent": traceparent, **({"tracestate": tracestate} if tracestate else {})}
        context = self._propagator.extract(carrier)
        span = self._trace.get_current_span(context).get_span_context()
        return context if span.is_valid and span.trace_flags.sampled else None

    def export(self, generation: Generation, trail: Trail) -> None:
        """The spans of a request that is over, soon; never blocks."""
        try:
            self._over.put_nowait((generation.request.trace, trail))
        except queue.Full:
            self._lost += 1
            if self._lost == 1:
                log.warning("spans are made more slowly than requests end: some are lost")

    def stop(self) -> None:
        """Exports what waits, for a short while."""
        ending = threading.Thread(target=self._finish, name="telemetry-end", daemon=True)
        ending.start()
        ending.join(_STOP_S)

    def _finish(self) -> None:
        self._over.put(None)
        self._thread.join()
        self._provider.shutdown()

    def _run(self) -> None:
        while (item := self._over.get()) is not None:
            try:
                self._spans(*item)
            except Exception:
                log.exception("the spans of a request cannot be made")

    def _spans(self, caller: Any, trail: Trail) -> None:
        """One span for the request, and in it one for the queue, each visit and each hand-off."""
        # Trails are told on the host's monotonic clock.
        epoch_ns = time.time_ns() - time.monotonic_ns()
        kind, status = self._trace.SpanKind, self._trace.StatusCode
        request = self._tracer.start_span(
            "tokenrouter.request",
            context=caller,
            kind=kind.SERVER,
            start_time=trail.arrived_ns + epoch_ns,
            attributes=self._facts(trail),
        )
        inside = self._trace.set_span_in_context(request)

        def child(name: str, start_ns: int, end_ns: int, **facts: Any) -> None:
            attributes = {f"tokenrouter.{key}": value for key, value in facts.items()}
            span = self._tracer.start_span(name, context=inside, start_time=start_ns + epoch_ns, attributes=attributes)
            span.end(max(start_ns, end_ns) + epoch_ns)

        child("queue", trail.arrived_ns, trail.started_ns or trail.ended_ns)
        for stay in trail.stays:
            facts = {"model": stay.model, "visit": stay.visit, "tokens": stay.tokens}
            child(f"visit {stay.model}", stay.begin_ns, stay.end_ns or trail.ended_ns, **facts)
        for left, entered in pairwise(trail.stays):
            if left.model != entered.model:
                child("hand-off", left.end_ns, entered.begin_ns, source=left.model, target=entered.model)
        if trail.end not in FINISHED:
            request.set_status(status.ERROR, trail.end)
        request.end(trail.ended_ns + epoch_ns)

    def _facts(self, trail: Trail) -> dict[str, Any]:
        """Attributes of the request's span; `gen_ai` ones are OpenTelemetry's own names."""
        written: dict[str, int] = {}
        for model, tokens in trail.runs:
            written[f"tokenrouter.tokens.{model}"] = written.get(f"tokenrouter.tokens.{model}", 0) + tokens
        facts: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": trail.prompt_tokens,
            "gen_ai.usage.output_tokens": sum(written.values()),
            "gen_ai.response.finish_reasons": [trail.end],
            "tokenrouter.policy": trail.policy,
            **written,
        }
        if trail.guesses:
            facts["tokenrouter.guesses.confirmed"] = sum(each.confirmed for each in trail.guesses)
            facts["tokenrouter.guesses.rolled_back"] = sum(each.rolled_back for each in trail.guesses)
        if trail.dropped:
            facts["tokenrouter.dropped"] = trail.dropped
        return facts
