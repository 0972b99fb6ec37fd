"""Kills models' processes where Triton survives it."""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from tokenrouter.metrics_page import fresh_scrape

_QUIET_S = 1.5


def kill_model(pid: int, model: str, metrics_url: str, number: int = signal.SIGKILL) -> None:
    """Signals a model's process while it publishes nothing.

    Each metric is a round trip through memory that it shares with tritonserver. If it dies in one, tritonserver waits
    for the other half for ever, or ten seconds for a lock and then aborts: see docs/security.md. A model publishes
    once a second at most, so just after one time is well before the next.
    """
    with suppress(TimeoutError):  # it has nothing to publish
        fresh_scrape(metrics_url, model, patience_s=_QUIET_S)
    os.kill(pid, number)
