"""Copies a server's log to the console while it grows, through restarts of the server."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import BinaryIO

_LOG_LIMIT = 64 << 20


class LogFollower:
    """Copies what is new with every `pump`. A file that was removed meanwhile can still be read to its end."""

    def __init__(self) -> None:
        self._log: BinaryIO | None = None

    def follow(self, path: Path, *, whole: bool) -> None:
        """From now on this file: from its beginning, or only what will be written."""
        self.close()
        self._log = path.open("r+b")
        if not whole:
            self._log.seek(0, 2)

    def pump(self) -> None:
        if self._log is None:
            return
        sys.stdout.write(self._log.read().decode("utf-8", "replace"))
        sys.stdout.flush()
        if self._log.tell() > _LOG_LIMIT:
            # The server appends, so it goes on at the start; lines written in between are lost here only.
            self._log.seek(0)
            self._log.truncate()

    def close(self) -> None:
        """Copies the rest."""
        self.pump()
        if self._log is not None:
            self._log.close()
            self._log = None
