"""What the supervisor knows, over HTTP. Triton's own health URLs stay green over dead models; these do not.

/healthz          200 while the supervisor works, whatever it is doing; it ends by itself when it gives up
/readyz           200 if tritonserver, the OpenAI-compatible server and of every model one replica are up, else 503
/readyz/MODEL     200 if tritonserver and this model, or replica, are up, else 503; 404 if there is no such model
/metrics          Prometheus: tokenrouter_restarts_total, tokenrouter_up, tokenrouter_recovery_seconds; label `model`

All but the last answer with JSON that says what is being brought back, and why; /readyz also which models of other
hosts are not connected.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import ThreadingWSGIServer
from prometheus_client.registry import Collector

from tools.launch.decisions import FRONT, SERVER, Condition, Phase, Status

_HEALTHY = (Phase.STARTING, Phase.SERVING, Phase.RESTARTING, Phase.STOPPING)


class Health:
    """The HTTP server; `publish` replaces what it tells.

    Args:
        host: address to listen on.
        port: where it listens.
        status: what it tells at first.
    """

    def __init__(self, host: str, port: int, status: Status) -> None:
        self.url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
        self._status = status
        registry = CollectorRegistry()
        registry.register(_Collector(lambda: self._status))
        self._metrics = make_wsgi_app(registry)
        self._server = make_server(host, port, self._app, ThreadingWSGIServer, _Quiet)
        threading.Thread(target=self._server.serve_forever, name="health", daemon=True).start()

    def publish(self, status: Status) -> None:
        self._status = status

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _app(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            page: Iterable[bytes] = self._metrics(environ, start_response)
            return page
        status, body = answer(path, self._status, now_s=time.monotonic())
        payload = json.dumps(body).encode() + b"\n"
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(payload)))]
        start_response(f"{status.value} {status.phrase}", headers)
        return [payload]


def answer(path: str, status: Status, *, now_s: float) -> tuple[HTTPStatus, dict[str, Any]]:
    """What a path but /metrics answers.

    Args:
        path: as in the request.
        status: of the deployment.
        now_s: on the clock of `status`.
    """
    if path == "/healthz":
        healthy = status.phase in _HEALTHY
        return _code(healthy), {"healthy": healthy, "state": status.phase.value, "reason": status.reason}
    if path == "/readyz":
        return _code(status.ready), {"ready": status.ready, **_told(status, now_s)}
    model = path.removeprefix("/readyz/")
    if model == path or "/" in model:
        return HTTPStatus.NOT_FOUND, {"error": "there is /healthz, /readyz, /readyz/MODEL and /metrics"}
    if model not in status.components:
        known = ", ".join(sorted(status.components.keys() - {SERVER, FRONT})) or "none yet"
        return HTTPStatus.NOT_FOUND, {"error": f"no model {model!r}; there is {known}", "state": status.phase.value}
    component = status.components[model]
    ready = status.phase is Phase.SERVING and component.condition is Condition.UP
    told = {"ready": ready, "model": model, "state": component.condition.value}
    return _code(ready), {**told, "seconds": round(now_s - component.since_s, 3), "reason": status.reason}


def _code(good: bool) -> HTTPStatus:
    return HTTPStatus.OK if good else HTTPStatus.SERVICE_UNAVAILABLE


def _told(status: Status, now_s: float) -> dict[str, Any]:
    components = sorted(status.components.items())
    restarting = (Condition.DEAD, Condition.RELOADING, Condition.STARTING)
    return {
        "state": status.phase.value,
        "reason": status.reason,
        "restarting": [name for name, each in components if each.condition in restarting],
        "away": [name for name, each in components if each.condition is Condition.AWAY],
        "processes": {
            name: {"state": each.condition.value, "seconds": round(now_s - each.since_s, 3)}
            for name, each in components
        },
        "restarts": status.restarts,
    }


class _Collector(Collector):
    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        restarts = CounterMetricFamily(
            "tokenrouter_restarts", "How often the supervisor brought a process back, or tried", labels=["model"]
        )
        up = GaugeMetricFamily("tokenrouter_up", "1 if the process serves", labels=["model"])
        recovery = GaugeMetricFamily(
            "tokenrouter_recovery_seconds", "From the last death to serving again", labels=["model"]
        )
        for name, component in status.components.items():
            # At 0 before the first time, or a rate over it would miss that.
            restarts.add_metric([name], status.restarts.get(name, 0))
            up.add_metric([name], float(component.condition is Condition.UP and status.phase is Phase.SERVING))
        for name, seconds in status.recovery_s.items():
            recovery.add_metric([name], seconds)
        yield from (restarts, up, recovery)


class _Quiet(WSGIRequestHandler):
    timeout = 10
    """Seconds that a client may take to send its request."""

    def log_message(self, format: str, *args: Any) -> None:
        pass
