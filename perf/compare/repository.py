"""Model repositories of the comparison: emulated engines that make the real policies route at given rates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perf.compare.workloads import Routing
from perf.emulated.repository import byte_tokenizer, write_emulated_repository
from perf.emulated.signals import HIDDEN_SIZE, signal_options, write_router
from tools.build_repository.thresholds import max_queue_delay_microseconds
from tools.dtmc.profile import Profile

LARGEST_BATCH = 64


def write_repository(
    folder: Path,
    policy: str,
    routing: Routing,
    profile: Profile,
    thresholds: Mapping[int, Mapping[str, int]],
    *,
    most: int,
    emulate: bool = True,
) -> Path:
    """Writes one.

    Args:
        folder: where to.
        policy: name of the policy, one of the file's.
        routing: its rates.
        profile: step times.
        thresholds: of delayed batching, by number in flight and model; empty is eager.
        most: largest number in flight.
        emulate: whether steps take their time; without, for tests of tokens.

    Returns:
        The folder.
    """
    options: dict[str, dict[str, Any]] = {
        name: {"max_batch_size": LARGEST_BATCH, "extend_ms_per_token": model.extend_ms_per_token}
        for name, model in profile.models.items()
    }
    params: dict[str, Any] = {"weights": routing.weights} if routing.weights else {}
    if not routing.weights:
        for name, signals in signal_options(routing.leave, routing.back).items():
            options[name] |= signals
    write_emulated_repository(
        folder,
        step_ms={name: model.step_ms if emulate else 0.0 for name, model in profile.models.items()},
        entry={"policy": policy, "policy_params": params, "max_inflight": most, "ensemble": None},
        batching={name: _batching(name, thresholds, profile, most) for name in profile.names},
        options={"hidden_size": HIDDEN_SIZE},
        per_model=options,
    )
    write_router(folder, policy, vocab_size=byte_tokenizer().get_vocab_size(with_added_tokens=True))
    return folder


def _batching(name: str, thresholds: Mapping[int, Mapping[str, int]], profile: Profile, most: int) -> dict[str, Any]:
    if not thresholds:
        return {}
    table = {n: row[name] for n, row in thresholds.items()}
    return {
        "threshold": table[max(table)],
        "batch_thresholds": table,
        "max_queue_delay_microseconds": max_queue_delay_microseconds(profile, most),
    }
