"""Policies that route like a profile: their P and C, their parameters, and what emulated models show them."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from perf.emulated.signals import HIDDEN_SIZE, ROUTED_BY_SIGNALS, signal_options
from tools.dtmc.errors import ProfileError
from tools.dtmc.profile import Profile
from tools.simulate.deployment import markov_policy

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
        weights = dict.fromkeys(profile.names, profile.routing[profile.entry])
        kept = dict.fromkeys(profile.names, dict.fromkeys(profile.names, 1.0))
        return msgspec.structs.replace(profile, routing=weights, commit=kept)
    return _between_two(profile, policy, leave_rate, return_rate)


def _between_two(profile: Profile, policy: str, leave_rate: float | None, return_rate: float | None) -> Profile:
    if len(profile.names) != 2:
        raise ProfileError(f"--policy {policy}: routes between two models; the profile has {', '.join(profile.names)}")
    small, large = profile.names
    given = zip(_rates(profile), (leave_rate, return_rate), strict=True)
    leave, back = (own if rate is None else rate for own, rate in given)
    if not 0.0 < leave <= 1.0 or not 0.0 < back <= 1.0:
        raise ProfileError(f"--policy {policy}: rates lie in (0, 1], not {leave:g} and {back:g}")
    if policy in ONE_TOKEN:
        if return_rate not in (None, 1.0):
            raise ProfileError(f"--policy {policy}: the large model writes one token per visit; no --return-rate")
        back = 1.0
    routing = {small: {small: 1.0 - leave, large: leave}, large: {small: back, large: 1.0 - back}}
    commit = {small: {small: 1.0, large: 0.0}, large: {small: 1.0, large: 1.0}}
    return msgspec.structs.replace(profile, routing=routing, commit=commit, entry=small)


def policy_params(profile: Profile, policy: str) -> dict[str, Any]:
    """Parameters with which a policy routes like a profile that `routed` returned for it.

    Raises:
        ProfileError: the policy does not follow a profile, or this one commits other than 0 or 1 tokens on a move.
    """
    if policy == "markov":
        params: dict[str, Any] = json.loads(markov_policy(profile).params)
        return params
    if policy == "random":
        return {"p": _rates(profile)[0]}
    if policy == "me":
        return {"weights": dict(profile.routing[profile.entry])}
    if policy == "scripted":
        return {"writers": [profile.entry], "trigger": "first"}  # with which the small model may go ahead
    if policy in ROUTED_BY_SIGNALS:
        return {}
    raise ProfileError(f"--policy {policy}: does not follow a profile; use one of {', '.join(FOLLOWING)}")


def signals(profile: Profile, policy: str, *, agreement: float | None = None) -> dict[str, dict[str, Any]]:
    """Engine options by model, with which `policy` decides at the profile's rates; the width of hidden states too.

    Args:
        agreement: how often other models than the first prefer the token that the first one prefers; None = always.
    """
    if policy not in ROUTED_BY_SIGNALS:
        plain = {name: {"hidden_size": 0} for name in profile.names}
        if agreement is None:
            return plain
        return {name: {**plain[name], "signals": _agreeing({}, name, profile, agreement)} for name in profile.names}
    options = signal_options(*_rates(profile), names=profile.names)
    if agreement is not None:
        options = {n: {"signals": _agreeing(shown["signals"], n, profile, agreement)} for n, shown in options.items()}
    return {name: {"hidden_size": HIDDEN_SIZE, **options[name]} for name in profile.names}


def _agreeing(shown: dict[str, Any], name: str, profile: Profile, agreement: float) -> dict[str, Any]:
    """The signals of a model; all have some, so that their logits are alike but for the tokens."""
    return {"unsure": 0.0, **shown, "agreement": 1.0 if name == profile.names[0] else agreement}


def _rates(profile: Profile) -> tuple[float, float]:
    """Probability of leaving the small model, and the large one, of two."""
    small, large = profile.names
    return profile.routing[small].get(large, 0.0), profile.routing[large].get(small, 0.0)
