"""The parts of `tools.tune`: what stands in a model repository, and what its server does under load."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tokenrouter.batcher import Batching
from tokenrouter.metrics_page import TAKEN, Scrape, fresh_scrape
from tokenrouter.repository import Repository
from tools.dtmc.errors import ThresholdError, TooLarge
from tools.dtmc.profile import Profile
from tools.dtmc.solve import solve
from tools.load import ClosedLoop, in_turn, stages
from tools.tritonserver.server import TritonServer

WARM_UP_S = 1.5
LEAST_COMPARED = 200
"""Discarded tokens from which on their agreement is believed: a standard error of 3.5 % at most."""


@dataclass(frozen=True)
class Options:
    """How to tune; see `python -m tools.tune --help`."""

    prompts: list[str]
    inflight: int
    max_tokens: int
    profile_s: float
    measure_s: float


@dataclass(frozen=True)
class Thresholds:
    """What the tuner reads of a model repository.

    Attributes:
        entry: the entry model.
        batching: of each model that the entry routes between.
    """

    entry: str
    batching: dict[str, Batching]

    def at(self, in_flight: int, names: Sequence[str]) -> dict[str, int]:
        """Thresholds that hold with so many in flight, of these models."""
        return {name: self.batching[name].threshold_at(in_flight) for name in names}


def read_thresholds(folder: Path, entry: str | None = None) -> Thresholds:
    """Those of the entry model's models.

    Raises:
        ConfigError: there is no such entry model, none, or more than one without a name; or a configuration is wrong.
    """
    repository = Repository(folder)
    chosen = repository.entry(entry)
    models = repository.models(chosen)
    return Thresholds(chosen.name, {name: models[name].batching for name in chosen.models})


@contextmanager
def working_copy(repository: Path, *, in_place: bool) -> Iterator[Path]:
    """The repository itself, or a copy in a temporary folder that goes away."""
    if in_place:
        yield repository
        return
    with tempfile.TemporaryDirectory(prefix="tokenrouter-tune-") as folder:
        yield Path(shutil.copytree(repository, Path(folder) / "model_repository"))


def tokens_per_second(
    server: TritonServer, entry: str, options: Options, report: Callable[[str, float], None]
) -> dict[int, float]:
    """Committed tokens per second by number in flight, from the server's own counter.

    Raises:
        LoadError: the server fails requests.
        TimeoutError: it does nothing.
    """
    rates = {}
    numbers = stages(options.inflight)
    for done, n in enumerate(numbers):
        report(f"measuring {n} in flight", done / len(numbers))
        with ClosedLoop(server.grpc_url, in_turn(entry, options.prompts, options.max_tokens), n) as loop:
            time.sleep(WARM_UP_S)
            before = fresh_scrape(server.metrics_url, entry)
            time.sleep(options.measure_s)
            rates[n] = rate(before, fresh_scrape(server.metrics_url, entry), entry)
            loop.check()
    return rates


def measuring_s(options: Options) -> float:
    """About how long `tokens_per_second` takes."""
    return len(stages(options.inflight)) * (WARM_UP_S + options.measure_s)


def rate(before: Scrape, after: Scrape, entry: str) -> float:
    """Committed tokens per second between two scrapes, by the time at which the entry model took its numbers."""
    delta = after.since(before)
    return delta.value("tokenrouter_tokens", model=entry) / delta.value(TAKEN, model=entry)


def measured_agreement(page: Scrape, entry: str) -> float | None:
    """Share of the small model's discarded tokens that the large one wrote itself; None if too few were compared."""
    compared = page.value("tokenrouter_discarded_tokens", model=entry)
    return page.value("tokenrouter_agreed_tokens", model=entry) / compared if compared >= LEAST_COMPARED else None


def predicted(profile: Profile, in_flight: int, thresholds: Mapping[str, int]) -> float | None:
    """Tokens per second by the Markov model; None where it does not apply, or is too large."""
    try:
        return solve(profile, in_flight, thresholds).tokens_per_second
    except (ThresholdError, TooLarge):
        return None
