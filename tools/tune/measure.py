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
from tokenrouter.config import entry_config, role_of, subserver_config
from tokenrouter.deployment import version_folder
from tokenrouter.repository import read_model_config
from tools.dtmc.errors import RepositoryError, ThresholdError
from tools.dtmc.profile import Profile
from tools.dtmc.solve import solve
from tools.metrics import TAKEN, Scrape, fresh_scrape
from tools.profiling.load import ClosedLoop
from tools.tritonserver.server import TritonServer

WARM_UP_S = 1.5


@dataclass(frozen=True)
class Repository:
    """What the tuner reads of a model repository.

    Attributes:
        folder: where it lies.
        entry: the entry model.
        batching: of each model that the entry routes between.
    """

    folder: Path
    entry: str
    batching: dict[str, Batching]

    def thresholds(self, in_flight: int, names: Sequence[str]) -> dict[str, int]:
        """Thresholds that hold with so many in flight, of these models."""
        return {name: self.batching[name].threshold_at(in_flight) for name in names}


def read_repository(folder: Path, entry: str | None = None) -> Repository:
    """Finds the entry model, unless it is named, and the thresholds of its models.

    Raises:
        RepositoryError: there is none, or more than one.
        ConfigError: a configuration is wrong.
    """
    configs = {path.parent.name: read_model_config(path.parent) for path in sorted(folder.glob("*/config.pbtxt"))}
    ours = {name: config for name, config in configs.items() if config.get("backend") == "tokenrouter_python"}
    entries = [name for name, config in ours.items() if role_of(config) == "orchestrator"]
    if entry is None and len(entries) != 1:
        raise RepositoryError(f"{folder}: entry models: {', '.join(entries) or 'none'}; name one with --entry")
    chosen = entry or entries[0]
    if chosen not in entries:
        raise RepositoryError(f"{folder}: no entry model {chosen!r}; there is {', '.join(entries) or 'none'}")
    models = entry_config(ours[chosen]).models
    if missing := [name for name in models if name not in ours]:
        raise RepositoryError(f"{folder}: {chosen} routes to {missing[0]!r}, which is not in the repository")
    batching = {}
    for name in models:
        version = version_folder(folder / name)
        batching[name] = subserver_config(ours[name], version).batching
    return Repository(folder, chosen, batching)


@contextmanager
def working_copy(repository: Path, *, in_place: bool) -> Iterator[Path]:
    """The repository itself, or a copy in a temporary folder that goes away."""
    if not repository.is_dir():
        raise RepositoryError(f"{repository}: no such folder; name a model repository")
    if in_place:
        yield repository
        return
    with tempfile.TemporaryDirectory(prefix="tokenrouter-tune-") as folder:
        yield Path(shutil.copytree(repository, Path(folder) / "model_repository"))


def tokens_per_second(
    server: TritonServer,
    repository: Repository,
    prompts: Sequence[str],
    *,
    in_flight: Sequence[int],
    max_tokens: int,
    seconds: float,
    report: Callable[[str, float], None],
) -> dict[int, float]:
    """Committed tokens per second with so many requests in flight, `seconds` each, from the server's own counter.

    Raises:
        ProfileError: the server fails requests.
        TimeoutError: it does nothing.
    """
    rates = {}
    for done, n in enumerate(in_flight):
        report(f"measuring {n} in flight", done / len(in_flight))
        with ClosedLoop(server.grpc_url, repository.entry, prompts, max_tokens=max_tokens, in_flight=n) as loop:
            time.sleep(WARM_UP_S)
            before = fresh_scrape(server.metrics_url, repository.entry)
            time.sleep(seconds)
            rates[n] = rate(before, fresh_scrape(server.metrics_url, repository.entry), repository.entry)
            loop.check()
    return rates


def rate(before: Scrape, after: Scrape, entry: str) -> float:
    """Committed tokens per second between two scrapes, by the time at which the entry model took its numbers."""
    delta = after.since(before)
    return delta.value("tokenrouter_tokens", model=entry) / delta.value(TAKEN, model=entry)


def predicted(profile: Profile, in_flight: int, thresholds: Mapping[str, int]) -> float | None:
    """Tokens per second by the Markov model; None for thresholds to which it does not apply."""
    try:
        return solve(profile, in_flight, thresholds).tokens_per_second
    except ThresholdError:
        return None
