"""Asks every model of a server for a recording."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, Queue
from typing import Any

import tritonclient.grpc as grpcclient

from tokenrouter.client import ServerError, infer_input
from tokenrouter.errors import InvalidRequest
from tokenrouter.timeline.recording import MOST_MS, PARAMETER, Recording

# Beyond the recording itself, for a busy server.
_PATIENCE_S = 60.0


def record(url: str, seconds: float, *, entry: str = "tokenrouter") -> list[Recording]:
    """What an entry model and the LLMs behind it did in the next seconds; the entry model's is the first.

    LLMs on other hosts are left out: their clocks are others.

    Args:
        url: host:port of Triton's gRPC endpoint.
        seconds: in (0, 60].
        entry: name of the entry model.

    Raises:
        InvalidRequest: `seconds` is out of range.
        ServerError: the server cannot be reached, refuses, or has no such model.
        ProtocolError: it answers something else.
    """
    if not 0 < seconds <= MOST_MS / 1000:
        raise InvalidRequest(f"seconds is {seconds:g}; a recording takes more than 0 and at most {MOST_MS // 1000}")
    ms = max(1, round(seconds * 1000))
    try:
        with grpcclient.InferenceServerClient(url) as client:
            models = [entry, *filter(client.is_model_ready, _models(client, entry))]
        with ThreadPoolExecutor(len(models)) as pool:
            return list(pool.map(lambda model: _of(url, model, ms), models))
    except grpcclient.InferenceServerException as exc:
        raise ServerError(f"{url}: {exc.message()}") from exc


def _models(client: Any, entry: str) -> list[str]:
    """The LLMs of an entry model, each of their replicas, small first."""
    parameters = client.get_model_config(entry).config.parameters
    if "models" not in parameters:
        raise ServerError(f"{entry!r} is no entry model: name one with --model")
    replicas = json.loads(parameters["replicas"].string_value) if "replicas" in parameters else {}
    models = str(parameters["models"].string_value).split(",")
    return [name for model in models for name in replicas.get(model, [model])]


def _of(url: str, model: str, ms: int) -> Recording:
    answers: Queue[tuple[Any, Any]] = Queue()
    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer(
            model,
            [infer_input("text_input", "-")],
            outputs=[grpcclient.InferRequestedOutput("text_output")],
            parameters={PARAMETER: ms},
        )
        try:
            result, error = answers.get(timeout=ms * 1e-3 + _PATIENCE_S)
        except Empty:
            raise ServerError(f"{url}: model {model!r} does not answer") from None
    if error is not None:
        raise error
    return Recording.read(result.as_numpy("text_output")[0].decode("utf-8"))
