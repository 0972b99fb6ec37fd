"""Policies that route like a profile: their P and C, their parameters, and what emulated models show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from perf.emulated.repository import byte_tokenizer
from perf.emulated.signals import HIDDEN_SIZE, ROUTED_BY_SIGNALS, signal_options, write_router
from tools.dtmc.errors import ProfileError
from tools.dtmc.profile import Profile

ONE_TOKEN = ("r2r", "citer", "collm", "random")
FOLLOWING = ("markov", "me", "random", *ROUTED_BY_SIGNALS)


def routed(
    profile: Profile, policy: str, *, leave_rate: float | None = None, return_rate: float | None = None
) -> Profile:
    """The profile with the P and C that a policy has at its rates.

    Args:
        profile: step times; where no rate is given, also the rates.
        policy: one of `FOLLOWING`; `markov` follows the profile as it is, `me` the weights in its entry's row.
        leave_rate: probability of leaving the small model after a step there; by default the profile's.
        return_rate: the same for the large one, for `rstitch`.

    Raises:
        ProfileError: the policy does not follow a profile, or needs two models, or a rate makes no sense.
    """
    rates = [rate for rate in (leave_rate, return_rate) if rate is not None]
    if policy not in FOLLOWING:
        raise ProfileError(f"--policy {policy}: does not follow a profile; use one of {', '.join(FOLLOWING)}")
    if rates and policy in ("markov", "me"):
        raise ProfileError(f"--policy {policy}: takes its probabilities from the profile, not from rates")
    if policy == "markov":
        return profile
    if policy == "me":
        weights = profile.routing[profile.entry]
        return _with(profile, dict.fromkeys(profile.names, weights), _all_kept(profile))
    if len(profile.names) != 2:
        raise ProfileError(f"--policy {policy}: routes between two models; the profile has {', '.join(profile.names)}")
    small, large = profile.names
    leave = profile.routing[small].get(large, 0.0) if leave_rate is None else leave_rate
    back = profile.routing[large].get(small, 0.0) if return_rate is None else return_rate
    if not 0.0 < leave <= 1.0 or not 0.0 < back <= 1.0:
        raise ProfileError(f"--policy {policy}: rates lie in (0, 1], not {leave:g} and {back:g}")
    if policy in ONE_TOKEN:
        if return_rate not in (None, 1.0):
            raise ProfileError(f"--policy {policy}: the large model writes one token per visit; no --return-rate")
        back = 1.0
    routing = {small: {small: 1.0 - leave, large: leave}, large: {small: back, large: 1.0 - back}}
    commit = {small: {small: 1.0, large: 0.0}, large: {small: 1.0, large: 1.0}}
    return _with(profile, routing, commit, entry=small)


def _all_kept(profile: Profile) -> dict[str, dict[str, float]]:
    return {name: dict.fromkeys(profile.names, 1.0) for name in profile.names}


def _with(
    profile: Profile, routing: dict[str, dict[str, float]], commit: dict[str, dict[str, float]], **fields: Any
) -> Profile:
    return msgspec.structs.replace(profile, routing=routing, commit=commit, **fields)


def policy_params(profile: Profile, policy: str) -> dict[str, Any]:
    """Parameters with which a policy routes like a profile that `routed` returned for it.

    Raises:
        ProfileError: the policy does not follow a profile, or this one commits other than 0 or 1 tokens on a move.
    """
    if policy == "markov":
        commit = {
            source: {target: int(tokens) for target, tokens in row.items()} for source, row in profile.commit.items()
        }
        if any(tokens not in (0, 1) for row in profile.commit.values() for tokens in row.values()):
            raise ProfileError("commit: policy markov commits 0 or 1 tokens on a move, not a mean; round them")
        # A move that the profile leaves out commits nothing there, and one token by default here.
        full = {i: {j: commit.get(i, {}).get(j, 0) for j in profile.names} for i in profile.names}
        return {"routing": profile.routing, "commit": full, "entry": profile.entry}
    if policy == "random":
        return {"p": _rates(profile)[0]}
    if policy == "me":
        return {"weights": dict(profile.routing[profile.entry])}
    if policy in ROUTED_BY_SIGNALS:
        return {}
    raise ProfileError(f"--policy {policy}: does not follow a profile; use one of {', '.join(FOLLOWING)}")


def signals(profile: Profile, policy: str) -> dict[str, dict[str, Any]]:
    """Engine options by model, with which `policy` decides at the profile's rates; the width of hidden states too."""
    if policy not in ROUTED_BY_SIGNALS:
        return {name: {"hidden_size": 0} for name in profile.names}
    options = signal_options(*_rates(profile))
    return {
        name: {"hidden_size": HIDDEN_SIZE, **options[role]}
        for name, role in zip(profile.names, ("small", "large"), strict=True)
    }


def write_files(repository: Path, policy: str) -> None:
    """The policy's router, if it has one."""
    write_router(repository, policy, vocab_size=byte_tokenizer().get_vocab_size(with_added_tokens=True))


def _rates(profile: Profile) -> tuple[float, float]:
    small, large = profile.names
    return profile.routing[small].get(large, 0.0), profile.routing[large].get(small, 0.0)
