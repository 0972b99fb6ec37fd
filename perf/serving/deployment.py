"""A model repository that emulates a profile, with thresholds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perf.emulated.repository import write_emulated_repository
from perf.serving.routing import policy_params, signals, write_files
from tools.dtmc.apply import max_queue_delay_microseconds
from tools.dtmc.profile import ModelProfile, Profile

LARGEST_BATCH = 64


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of a server.

    Attributes:
        label: how they are called in the output.
        by_in_flight: number in flight -> thresholds by model. The key 0 stands for any number.
    """

    label: str
    by_in_flight: dict[int, dict[str, int]] = field(default_factory=dict)

    def at(self, in_flight: int, names: tuple[str, ...]) -> dict[str, int]:
        """Thresholds of every model with so many in flight, by the server's own rule; models left out have 1."""
        known = [n for n in self.by_in_flight if n <= in_flight]
        chosen = self.by_in_flight[max(known)] if known else {}
        return {name: chosen.get(name, 1) for name in names}


def write_profile_repository(
    folder: Path,
    profile: Profile,
    *,
    thresholds: Thresholds,
    policy: str,
    most_in_flight: int,
    around_ms: Mapping[str, float] | None = None,
) -> Path:
    """Writes emulated models with the profile's step times.

    Args:
        folder: where to.
        profile: step times and routing.
        thresholds: of delayed batching.
        policy: one of `routing.FOLLOWING`, with a profile that `routing.routed` returned for it; or ``scripted``, whose
            parameters every request brings.
        most_in_flight: largest number in flight that will be measured; the delay bound is made for it.
        around_ms: by model, what the server's own work adds to the engine's part of a step. The engines are that much
            faster, so that whole steps take the profile's time.

    Returns:
        The folder.

    Raises:
        ProfileError: the policy cannot route like the profile.
    """
    params = {"writers": [profile.entry]} if policy == "scripted" else policy_params(profile, policy)
    shown = signals(profile, policy)
    write_emulated_repository(
        folder,
        step_ms={
            name: engine_times(model, most_in_flight, (around_ms or {}).get(name, 0.0))
            for name, model in profile.models.items()
        },
        entry={
            "policy": policy,
            "policy_params": params,
            "max_inflight": most_in_flight,
            "ensemble": None,
        },
        batching={name: _batching(name, thresholds, profile, most_in_flight) for name in profile.names},
        per_model={name: {**_options(model), **shown[name]} for name, model in profile.models.items()},
    )
    write_files(folder, policy)
    return folder


def engine_times(model: ModelProfile, largest: int, around_ms: float) -> float | dict[int, float]:
    """Engine time of a step, at every batch size because engine and profile differ in how they continue a table."""
    if isinstance(model.step_ms, float):
        return max(0.0, model.step_ms - around_ms)
    return {batch: max(0.0, model.step_time_ms(batch) - around_ms) for batch in range(1, largest + 1)}


def _batching(name: str, thresholds: Thresholds, profile: Profile, most: int) -> dict[str, Any]:
    if not thresholds.by_in_flight:
        return {}
    fields: dict[str, Any] = {"max_queue_delay_microseconds": max_queue_delay_microseconds(profile, most)}
    if set(thresholds.by_in_flight) == {0}:
        return {**fields, "threshold": thresholds.by_in_flight[0].get(name, 1)}
    table = {n: row.get(name, 1) for n, row in thresholds.by_in_flight.items()}
    return {**fields, "threshold": table[max(table)], "batch_thresholds": table}


def _options(model: ModelProfile) -> dict[str, Any]:
    options: dict[str, Any] = {"max_batch_size": model.max_batch or LARGEST_BATCH}
    if model.extend_ms_per_token:
        options["extend_ms_per_token"] = model.extend_ms_per_token
    return options
