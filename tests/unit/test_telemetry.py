"""When spans are exported, and what a caller's header has to be."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tokenrouter import telemetry
from tokenrouter.errors import ConfigError
from tokenrouter.timeline.trail import Guessed, Stay, Trail

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
NAMES = (*telemetry.ENDPOINTS, "OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_off_by_default_and_then_nothing_of_the_sdk_is_imported() -> None:
    assert telemetry.from_environment("tokenrouter") is None
    program = (
        "import sys; from tokenrouter import telemetry; assert telemetry.from_environment('a') is None; "
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_standard_variables_decide(given: dict[str, str], expected: bool) -> None:
    assert telemetry.configured(given) == expected


def test_another_protocol_and_a_missing_sdk_are_refused(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    environment.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(ConfigError, match=r"'grpc'.*http/protobuf"):
        telemetry.from_environment("tokenrouter")
    environment.delenv("OTEL_EXPORTER_OTLP_PROTOCOL")
    environment.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"opentelemetry.* is missing: pip install tokenrouter\[otel\]"):
        telemetry.from_environment("tokenrouter")


@pytest.fixture
def made(environment: pytest.MonkeyPatch) -> Any:
    """What exports, into a list, and the list."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    environment.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    exporter = InMemorySpanExporter()
    found = telemetry.Telemetry("tokenrouter", SimpleSpanProcessor(exporter))
    yield found, exporter
    found.stop()


@pytest.mark.parametrize(
    ("header", "known"),
    [
        (f"00-{TRACE}-{SPAN}-01", True),
        (f"00-{TRACE}-{SPAN}-00", False),  # not sampled
        (f"cc-{TRACE}-{SPAN}-01-what-comes-later", True),  # of a later version
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{TRACE}-{SPAN}-01-more", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", False),
        (f"00-{TRACE}-{SPAN}", False),
        ("", False),
        ("\0" * 4096, False),
        ("00-" + "é" * 53, False),
    ],
)
def test_headers_as_w3c_has_them(made: Any, header: str, known: bool) -> None:
    caller = made[0].caller(header, "vendor=1,,=,bad")
    assert (caller is not None) == known


def test_spans_of_a_trail(made: Any) -> None:
    from opentelemetry.trace import StatusCode

    exporting, exporter = made
    stays = [Stay("small", 1, 30, 50, 2), Stay("large", 2, 60, 90, 1, "small"), Stay("large", 3, 95, 0, 0)]
    runs = [("small", 2), ("large", 1)]
    trail = Trail(7, "random", 5, 0, 10, 10, 20, 100, "engine_failed", stays, [Guessed(1, 3, 1, 2)], runs)
    exporting._spans(exporting.caller(f"00-{TRACE}-{SPAN}-01"), trail)
    spans = exporter.get_finished_spans()
    (root,) = [span for span in spans if span.name == "tokenrouter.request"]
    assert format(root.context.trace_id, "032x") == TRACE
    assert format(root.parent.span_id, "016x") == SPAN
    assert (root.status.status_code, root.status.description) == (StatusCode.ERROR, "engine_failed")
    times = {
        (span.name, span.start_time - root.start_time, span.end_time - root.start_time)
        for span in spans
        if span is not root
    }
    assert times == {
        ("queue", 0, 10),
        ("visit small", 20, 40),
        ("hand-off", 40, 50),
        ("visit large", 50, 80),
        ("visit large", 85, 90),
    }
    assert all(span.parent.span_id == root.context.span_id for span in spans if span is not root)
    facts = dict(root.attributes)
    assert (facts["tokenrouter.tokens.small"], facts["gen_ai.usage.output_tokens"]) == (2, 3)
    assert (facts["tokenrouter.guesses.confirmed"], facts["tokenrouter.guesses.rolled_back"]) == (1, 2)


def test_what_cannot_be_exported_in_time_is_lost_and_nobody_waits(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    exporting, _ = made

    class Full:
        def put_nowait(self, item: object) -> None:
            raise telemetry.queue.Full

        def put(self, item: object) -> None:
            waiting.put(item)

    waiting, exporting._over = exporting._over, Full()
    generation: Any = type("Generation", (), {"request": type("Request", (), {"trace": None})})
    exporting.export(generation, Trail(1, "a", 1, 0, 0, 0))
    assert exporting._lost == 1
