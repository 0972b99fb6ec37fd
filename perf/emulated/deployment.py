"""A deployment of emulated models with a profile's step times and routing: its repository, and a server of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from perf.emulated.repository import write_emulated_repository
from perf.emulated.routing import policy_params, signals
from perf.emulated.signals import write_router
from tokenrouter.speculation import Speculation
from tools.build_repository.thresholds import max_queue_delay_microseconds
from tools.dtmc.profile import Profile
from tools.tritonserver.server import TritonServer

LARGEST_BATCH = 64


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of a server.

    Attributes:
        label: how they are called in the output.
        by_in_flight: number in flight -> thresholds by model; empty is eager. The key 0 stands for any number.
    """

    label: str
    by_in_flight: Mapping[int, Mapping[str, int]] = field(default_factory=dict)

    def at(self, in_flight: int, names: tuple[str, ...]) -> dict[str, int]:
        """Thresholds of every model with so many in flight, by the server's own rule; models left out have 1."""
        known = [n for n in self.by_in_flight if n <= in_flight]
        chosen = self.by_in_flight[max(known)] if known else {}
        return {name: chosen.get(name, 1) for name in names}


EAGER = Thresholds("eager")


def batching(
    model: str, by_in_flight: Mapping[int, Mapping[str, int]], profile: Profile, most_in_flight: int
) -> dict[str, Any]:
    """Fields of `BatchingSpec` for thresholds as in `Thresholds`; the delay bound is made for `most_in_flight`."""
    if not by_in_flight:
        return {}
    table = {n: row.get(model, 1) for n, row in by_in_flight.items()}
    fixed = {
        "threshold": table[max(table)],
        "max_queue_delay_microseconds": max_queue_delay_microseconds(profile, most_in_flight),
    }
    return fixed if set(table) == {0} else {**fixed, "batch_thresholds": table}


@dataclass(frozen=True)
class EmulatedDeployment:
    """What is emulated.

    Example::

        with EmulatedDeployment(profile, "markov", most_in_flight=8).serve() as server:
            print(server.grpc_url)

    Attributes:
        profile: step times and routing.
        policy: one of `routing.FOLLOWING`, with a profile that `routing.routed` returned for it; or ``scripted``, whose
            parameters every request brings.
        most_in_flight: largest number of requests in flight; the delay bound is made for it.
        thresholds: of delayed batching.
        around_ms: by model, what the server's own work adds to the engine's part of a step. The engines are that much
            faster, so that whole steps take the profile's time.
        agreement: share of positions, in [0, 1], at which the large model writes what the small one would have
            written; None: all models prefer the same tokens.
        speculation: how far the small model goes ahead; None = not at all.
        replicas: of each model; one that is left out has 1.
    """

    profile: Profile
    policy: str
    most_in_flight: int
    thresholds: Thresholds = EAGER
    around_ms: Mapping[str, float] = field(default_factory=dict)
    agreement: float | None = None
    speculation: Speculation | None = None
    replicas: Mapping[str, int] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Writes the model repository and returns the folder.

        Raises:
            ProfileError: the policy cannot route like the profile.
        """
        entry = {
            "policy": self.policy,
            "policy_params": policy_params(self.profile, self.policy),
            "max_inflight": self.most_in_flight,
            "aliases": {},
            "speculation": None if self.speculation is None else msgspec.to_builtins(self.speculation),
        }
        names, shown = self.profile.names, signals(self.profile, self.policy, agreement=self.agreement)
        write_emulated_repository(
            folder,
            step_ms={name: self._engine_ms(name) for name in names},
            entry=entry,
            batching={
                name: batching(name, self.thresholds.by_in_flight, self.profile, self.most_in_flight) for name in names
            },
            per_model={name: {**self._options(name), **shown[name]} for name in names},
            replicas=self.replicas,
        )
        write_router(folder, self.policy)
        return folder

    @contextmanager
    def serve(self) -> Iterator[TritonServer]:
        """A running server, with its repository in a temporary folder."""
        with (
            tempfile.TemporaryDirectory(prefix="tokenrouter-perf-") as folder,
            TritonServer(self.write(Path(folder))) as server,
        ):
            yield server

    def _engine_ms(self, name: str) -> float | dict[int, float]:
        """At every batch size, because a table that is cut off at 0 would be continued by another slope."""
        model, around_ms = self.profile.models[name], self.around_ms.get(name, 0.0)
        if isinstance(model.step_ms, float):
            return max(0.0, model.step_ms - around_ms)
        return {batch: max(0.0, model.step_time_ms(batch) - around_ms) for batch in range(1, self.most_in_flight + 1)}

    def _options(self, name: str) -> dict[str, Any]:
        model = self.profile.models[name]
        return {"max_batch_size": model.max_batch or LARGEST_BATCH, "extend_ms_per_token": model.extend_ms_per_token}
