"""What a replica of each model costs."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from tokenrouter.errors import ConfigError
from tokenrouter.yaml_files import load_yaml
from tools.dtmc.profile import Profile
from tools.errors import CommandError


def read_prices(path: Path | None, profile: Profile) -> dict[str, float]:
    """Price of one replica per hour by model, from a YAML or JSON mapping; without a file every replica costs 1.

    Raises:
        CommandError: the file is no such mapping, or lacks a model.
    """
    if path is None:
        return dict.fromkeys(profile.names, 1.0)
    form = f"give a price per replica and hour for each of {', '.join(profile.names)}, e.g. {profile.names[0]}: 2.5"
    try:
        prices = msgspec.convert(load_yaml(path), dict[str, float])
    except (msgspec.ValidationError, ConfigError) as exc:
        raise CommandError(f"--prices {path}: {exc}; {form}") from exc
    if set(prices) != set(profile.names):
        raise CommandError(f"--prices {path}: has {', '.join(prices) or 'nothing'}; {form}")
    if wrong := [name for name, price in prices.items() if not (math.isfinite(price) and price > 0)]:
        raise CommandError(f"--prices {path}: {wrong[0]} is {prices[wrong[0]]:g}; give a positive number")
    return prices
