"""What a model is by its config.pbtxt: one of our roles, in one instance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenrouter.errors import ConfigError

ENTRY_ROLES = ("orchestrator", "unary", "preprocessing", "postprocessing")
"""Of models with the parameters of an entry model: itself, and what some clients need beside it (docs/clients.md)."""
ROLES = (*ENTRY_ROLES, "subserver")


def role_of(model_config: Mapping[str, Any]) -> str:
    """One of `ROLES`, from the parameter `role`.

    Raises:
        ConfigError: there is no such parameter, or it says something else.
    """
    role = str(model_config.get("parameters", {}).get("role", {}).get("string_value", ""))
    if role not in ROLES:
        raise ConfigError(
            f"model {model_config.get('name')!r}: parameter role is {role!r}; it is one of {', '.join(ROLES)}"
        )
    return role


def refuse_instances(model_config: Mapping[str, Any]) -> None:
    """Refuses a config.pbtxt that asks for more than one instance of a model that has state of its own.

    Args:
        model_config: as Triton hands it over, with the groups that it has filled in.

    Raises:
        ConfigError: says what to do instead.
    """
    groups = model_config.get("instance_group", [])
    # On GPUs `count` is per GPU.
    instances = sum(
        int(group.get("count", 1)) * (max(1, len(group.get("gpus", []))) if group.get("kind") == "KIND_GPU" else 1)
        for group in groups
    )
    if instances > 1:
        raise ConfigError(
            f"model {model_config.get('name')!r}: instance_group in config.pbtxt makes {instances} instances; a "
            "request and its KV cache are in one of them, so they cannot stand for each other. Leave one of "
            "KIND_CPU, and for more throughput give the model more GPUs (gpus) or add a model of its own"
        )
