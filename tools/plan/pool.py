"""Evaluates several deployments at once, on so many cores; what was evaluated once is remembered."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from types import TracebackType
from typing import Any

import torch

from tools.dtmc.profile import Profile, dump_profile, parse_profile
from tools.plan.candidate import Candidate
from tools.plan.demand import Demand, Objectives
from tools.plan.evaluate import Prediction, evaluate
from tools.tritonserver.processes import die_with_parent


class Pool:
    """A context manager.

    Args:
        workers: processes; 1 is this one.

    Attributes:
        seen: every prediction so far, by deployment and number of requests.
    """

    def __init__(
        self, profile: Profile, demand: Demand, objectives: Objectives, *, seed: int = 0, workers: int = 1
    ) -> None:
        self.workers = workers
        self.seen: dict[tuple[Candidate, int], Prediction] = {}
        self._what = (profile, demand, objectives, seed)
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def predict(
        self, candidates: Sequence[Candidate], requests: int, *, least: int, to_the_end: bool = False
    ) -> dict[Candidate, Prediction]:
        """Predictions of all of them; see `evaluate`."""
        new = [
            each
            for each in dict.fromkeys(candidates)
            if (known := self.seen.get((each, requests))) is None or (to_the_end and not known.complete)
        ]
        profile, demand, objectives, seed = self._what
        options: dict[str, Any] = {"requests": requests, "seed": seed, "to_the_end": to_the_end, "least": least}
        if self.workers > 1 and len(new) > 1:
            # As text, because what a profile remembers of itself does not travel.
            job = partial(_evaluate, dump_profile(profile), demand, objectives, **options)
            found = list(self._started().map(job, new))
        else:
            found = [evaluate(profile, each, demand, objectives, **options) for each in new]
        self.seen.update({(each, requests): one for each, one in zip(new, found, strict=True)})
        return {each: self.seen[each, requests] for each in candidates}

    def _started(self) -> ProcessPoolExecutor:
        if self._executor is None:
            # Not by fork: the bar that shows how far it is has a thread.
            self._executor = ProcessPoolExecutor(
                self.workers, get_context("spawn"), initializer=_begin, initargs=(os.getpid(),)
            )
        return self._executor


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0))


def _begin(parent: int) -> None:
    die_with_parent()  # a deployment may take minutes, and nobody would want it any more
    if os.getppid() != parent:
        sys.exit()
    torch.set_num_threads(1)


def _evaluate(profile: str, demand: Demand, objectives: Objectives, candidate: Candidate, **options: Any) -> Prediction:
    return evaluate(parse_profile(profile), candidate, demand, objectives, **options)
