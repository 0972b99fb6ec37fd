"""A log that strangers cannot fill."""

from __future__ import annotations

import logging

_PAUSE_NS = 10 * 10**9
_MOST_TEXTS = 64


class SparseLog:
    """Writes a line at most once in ten seconds, and at most so many different ones in that time.

    Args:
        log: where to.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._written: dict[str, int] = {}

    def warning(self, text: str, *, now_ns: int) -> None:
        """One line, unless it was written a moment ago."""
        written = self._written
        for old in [old for old, at_ns in written.items() if now_ns - at_ns >= _PAUSE_NS]:
            del written[old]
        if text not in written and len(written) < _MOST_TEXTS:
            written[text] = now_ns
            self._log.warning("%s", text)
