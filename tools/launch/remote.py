"""Models that entry models of this host route to: their replicas, which are on other hosts, which are connected."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress

from tokenrouter.config.entry import EntryConfig
from tokenrouter.config.roles import role_of
from tokenrouter.errors import ConfigError
from tokenrouter.metrics_page import connected, fetch
from tokenrouter.repository import BACKEND, Repository

_ROUTING = ("orchestrator", "unary")
_POLL_S = 0.25
_PAGE_S = 5.0


def with_names(load: Sequence[str], arguments: Sequence[str], known: Collection[str]) -> tuple[list[str], list[str]]:
    """Models to load, and what is left of the arguments: ``--load tokenrouter large`` may name several, and lists.

    Raises:
        ConfigError: there is no such model.
    """
    names = [name for text in load for name in text.split(",")]
    if names:
        names += [argument for argument in arguments if argument in known]
        arguments = [argument for argument in arguments if argument not in known]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--load {unknown[0]}: there is no such model; there are {', '.join(sorted(known))}")
    return names, list(arguments)


def needed(repository: Repository, loaded: Collection[str]) -> dict[str, list[str]]:
    """Models of other hosts by the entry model of this host that routes to them.

    Args:
        repository: the model repository.
        loaded: what this host is to load; empty for everything.
    """
    return {entry.name: list(entry.hosts) for entry in _entries(repository, loaded) if entry.hosts}


def replicas(repository: Repository, loaded: Collection[str]) -> list[tuple[str, ...]]:
    """Names of the replicas of each model that entry models of this host route to, whichever hosts serve them.

    Args:
        repository: the model repository.
        loaded: what this host is to load; empty for everything.
    """
    return sorted({names for entry in _entries(repository, loaded) for names in entry.all_replicas.values()})


def _entries(repository: Repository, loaded: Collection[str]) -> Iterator[EntryConfig]:
    for name in repository.names():
        with suppress(ConfigError):
            config = repository.config(name)
            if config.get("backend") == BACKEND and role_of(config) in _ROUTING and (not loaded or name in loaded):
                yield repository.entry(name)


def states(metrics_url: str, needed: Mapping[str, Collection[str]]) -> dict[str, bool]:
    """Whether each model of another host is connected with every entry model of this host that needs it."""
    try:
        page = fetch(metrics_url, timeout_s=_PAGE_S)
    except (OSError, ValueError):
        page = ""
    found = {entry: connected(page, entry) for entry in needed}
    models = sorted({model for names in needed.values() for model in names})
    return {
        model: all(found[entry].get(model, False) for entry, names in needed.items() if model in names)
        for model in models
    }


def wait(
    metrics_url: str,
    needed: Mapping[str, Collection[str]],
    replicas: Collection[Collection[str]],
    within_s: float,
    stopped: Callable[[], bool],
) -> list[str]:
    """Waits until of every model one replica is here or connected. Returns those that keep it waiting in the end."""
    until = time.monotonic() + within_s
    while needed:
        found = states(metrics_url, needed)
        missing = [name for names in replicas if not any(found.get(name, True) for name in names) for name in names]
        if not missing or stopped() or time.monotonic() >= until:
            return missing
        time.sleep(_POLL_S)
    return []
