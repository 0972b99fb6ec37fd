"""How far long work is, on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Report = Callable[[str, float], None]
"""Told a stage and how much of it is done, in 0..1."""

PATIENCE_S = 1.0
LINE_EVERY_S = 30.0


def silent(_stage: str, _share: float) -> None:
    """Reports nothing."""


class LateProgress:
    """Call it with (stage, share): a bar from `PATIENCE_S` on that goes away at the end.

    Where stderr is no terminal, a line every `LINE_EVERY_S` instead.
    """

    def __init__(self) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        self._console = Console(stderr=True)
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task("", total=1.0)
        self._share = 0.0
        self._next_s = time.monotonic() + (PATIENCE_S if self._console.is_interactive else LINE_EVERY_S)

    def __call__(self, stage: str, share: float) -> None:
        """Shows how far a stage is; `share` is in 0..1, and falls where other work begins."""
        if share < self._share:
            self._progress.reset(self._task)
        self._share = share
        self._progress.update(self._task, description=stage, completed=share)
        if time.monotonic() < self._next_s:
            return
        if self._console.is_interactive:
            self._progress.start()
        else:
            print(f"{stage}: {share:.0%}", file=sys.stderr, flush=True)
            self._next_s = time.monotonic() + LINE_EVERY_S

    def note(self, line: str) -> None:
        """A line that stays."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> LateProgress:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._console.is_interactive:
            self._progress.stop()


@contextmanager
def counted(stage: str, total: int) -> Iterator[Callable[[int], None]]:
    """Progress of one stage; what it yields adds to the number of units that are done."""
    done = 0
    with LateProgress() as report:

        def advance(units: int) -> None:
            nonlocal done
            done += units
            report(f"{stage}: {done} of {total}", done / max(1, total))

        yield advance
