"""What is known without simulation: how long a response takes alone, and how many replicas the work needs at least."""

from __future__ import annotations

import math

import numpy as np

from tools.dtmc.network import routing_shares
from tools.dtmc.profile import ModelProfile, Profile
from tools.plan.demand import Demand

_LARGEST_BATCH = 256


def alone_ms(profile: Profile, demand: Demand) -> float:
    """Mean time of a response when no other runs: its steps, hand-offs, and the prompt at every model it visits."""
    routing = np.array(profile.routing_matrix)
    share = routing_shares(routing, profile.names.index(profile.entry))
    tokens_per_step = float(share @ (routing * np.array(profile.commit_matrix)).sum(axis=1))
    leaves = float(share @ (1.0 - np.diag(routing)))
    step_ms = sum(part * model.step_time_ms(1) for part, model in zip(share, profile.models.values(), strict=True))
    visited = [model for part, model in zip(share, profile.models.values(), strict=True) if part > 1e-9]
    prompt_ms = sum(model.extend_ms_per_token for model in visited) * demand.mean_prompt
    return demand.mean_output * float(step_ms + leaves * profile.handoff_ms) / tokens_per_step + prompt_ms


def least_replicas(profile: Profile, demand: Demand) -> tuple[int, ...]:
    """Of each model, what its steps need in the best batches and KV needs if nobody waits, at least 1."""
    routing = np.array(profile.routing_matrix)
    share = routing_shares(routing, profile.names.index(profile.entry))
    tokens_per_step = float(share @ (routing * np.array(profile.commit_matrix)).sum(axis=1))
    resident = demand.rate * alone_ms(profile, demand) * 1e-3
    found = []
    for part, model in zip(share, profile.models.values(), strict=True):
        rows = demand.mean_output * float(part) / tokens_per_step
        busy_ms = rows * _least_ms_per_row(model)
        if part > 1e-9:
            busy_ms += model.extend_ms_per_token * demand.mean_prompt
        needed = demand.rate * busy_ms * 1e-3
        if model.kv_tokens is not None:
            needed = max(needed, resident * (demand.mean_prompt + demand.mean_output) / model.kv_tokens)
        found.append(max(1, math.floor(needed)))
    return tuple(found)


def _least_ms_per_row(model: ModelProfile) -> float:
    largest = min(model.max_batch or _LARGEST_BATCH, _LARGEST_BATCH)
    return min(model.step_time_ms(batch) / batch for batch in range(1, largest + 1))
