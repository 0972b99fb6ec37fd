"""One streamed response over Triton's generate_stream (server-sent events)."""

from __future__ import annotations

import http.client
import json
from typing import Any

from perf.load.timing import Timing


def run(connection: http.client.HTTPConnection, model: str, body: bytes, timing: Timing) -> Timing:
    """Sends a request and waits for its end.

    Args:
        connection: to Triton's HTTP endpoint; its timeout bounds every read. It can be used again afterwards.
        model: name of the entry model.
        body: JSON object of the tensors.
        timing: filled and returned; what fails is its `error`.
    """
    try:
        connection.request("POST", f"/v2/models/{model}/generate_stream", body)
        response = connection.getresponse()
        for line in response:
            if line.startswith(b"data:"):
                _read(json.loads(line[5:]), timing)
            elif response.status != http.client.OK:
                _read(json.loads(line), timing)
    except (OSError, http.client.HTTPException, ValueError) as exc:
        connection.close()
        timing.error = f"{type(exc).__name__}: {exc}"
    if not timing.error and not timing.finish_reason:
        timing.error = f"the stream ended after {timing.tokens} tokens without a finish_reason"
    return timing


def _read(event: dict[str, Any], timing: Timing) -> None:
    timing.error = timing.error or str(event.get("error", ""))
    ids = event.get("output_ids", [])
    timing.add(len(ids) if isinstance(ids, list) else 1)
    timing.finish_reason = timing.finish_reason or str(event.get("finish_reason", ""))
