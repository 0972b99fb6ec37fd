"""A progress bar on stderr that appears only when the work takes a while."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

PATIENCE_S = 1.0


class LateProgress:
    """Call it with (stage, share); the bar is drawn from `PATIENCE_S` seconds on, and removed at the end."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=1.0)
        self._drawn = False

    def __call__(self, stage: str, share: float) -> None:
        """Shows how far a stage is; `share` is in 0..1."""
        if not self._drawn and time.monotonic() - self._began_s > PATIENCE_S:
            self._progress.start()
            self._drawn = True
        self._progress.update(self._task, description=stage, completed=share)

    def __enter__(self) -> LateProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._drawn:
            self._progress.stop()
