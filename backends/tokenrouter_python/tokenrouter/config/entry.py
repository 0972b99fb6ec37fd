"""The entry model's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from tokenrouter.channel.address import Address
from tokenrouter.channel.tls import TlsSettings
from tokenrouter.config.parameters import (
    MAX_INFLIGHT,
    MAX_REQUEST,
    MAX_REQUEST_SECONDS,
    POLICY_CACHE,
    QUEUE,
    TLS,
    Parameters,
    Row,
    check_no_native_queue,
)
from tokenrouter.config.values import (
    boolean,
    hosts,
    ids,
    json_as,
    json_object,
    milliseconds,
    names,
    natural,
    paths,
)
from tokenrouter.entry_queue import EntryQueuePolicy, Priorities
from tokenrouter.errors import ConfigError
from tokenrouter.messages import PolicySpec
from tokenrouter.policies import BUILTIN
from tokenrouter.policies.cache import MAX_BYTES
from tokenrouter.request import Defaults, Limits
from tokenrouter.speculation import Speculation

DEFAULT_POLICY = PolicySpec("single")


@dataclass(frozen=True)
class EntryConfig:
    """The orchestrator's configuration.

    Attributes:
        name: the entry model's name.
        models: names of the deployment's models, small first (parameter `models`).
        policy: the deployment's policy (`policy`, `policy_params`).
        selectable: policies that a client may choose (`selectable_policies`; default: all built-in ones).
        max_inflight: most requests that run at once (`max_inflight`).
        connect_timeout_ns: how long a request waits for an unconnected model (`connect_timeout_ms`).
        queue: parameters with the names of Triton's ModelQueuePolicy: `max_queue_size`, `timeout_action`,
            `default_timeout_microseconds`, `allow_timeout_override`. Why not in `dynamic_batching`: see `entry_queue`.
        priorities: parameters with the names of Triton's ModelDynamicBatching: `priority_levels`,
            `default_priority_level`, `priority_queue_policy` (a JSON object of queue policies by level).
        max_request_ns: a request ends with an error so long after its arrival (`max_request_seconds`); 0 = no limit.
        policy_checkpoints: files and folders that clients may name in `policy_params`, relative to the repository
            (`policy_checkpoints`); the policy's own is among them anyway.
        policy_cache_bytes: most that loaded policies hold (`policy_cache_mib`).
        speculation: whether and how far the small model goes ahead (`speculation`, a JSON object with the fields of
            `speculation.Speculation`); None: only for requests that ask for it.
        limits: what one request may hold (`limits`, a JSON object with the fields of `request.Limits`).
        defaults: of fields that a request leaves out (`defaults`, a JSON object with those of `request.Defaults`).
        end_ids: overrides the first model's end ids (`end_ids`), or None.
        allow_added_tokens: accepts that a model's tokenizer has further tokens at its end (`allow_added_tokens`).
        allow_special_tokens: accepts that special tokens differ (`allow_special_tokens`, which needs `end_ids`).
        replicas: names by model (`replicas`, a JSON object); a model that is left out serves itself.
        hosts: where those on other hosts listen, by name (`hosts`, a JSON object).
        tls: how hosts trust each other (`tls`, a JSON object with the fields of `channel.tls.TlsSettings`).
    """

    name: str
    models: tuple[str, ...]
    policy: PolicySpec = DEFAULT_POLICY
    selectable: frozenset[str] = frozenset(BUILTIN)
    max_inflight: int = 64
    connect_timeout_ns: int = 30 * 10**9
    queue: EntryQueuePolicy = field(default_factory=EntryQueuePolicy)
    priorities: Priorities = field(default_factory=Priorities)
    max_request_ns: int = MAX_REQUEST_SECONDS * 10**9
    policy_checkpoints: tuple[str, ...] = ()
    policy_cache_bytes: int = MAX_BYTES
    speculation: Speculation | None = None
    limits: Limits = field(default_factory=Limits)
    defaults: Defaults = field(default_factory=Defaults)
    end_ids: tuple[int, ...] | None = None
    allow_added_tokens: bool = False
    allow_special_tokens: bool = False
    replicas: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    hosts: Mapping[str, Address] = field(default_factory=dict)
    tls: TlsSettings = field(default_factory=TlsSettings)

    @property
    def all_replicas(self) -> dict[str, tuple[str, ...]]:
        """Names by model, of every model."""
        return {model: self.replicas.get(model, (model,)) for model in self.models}


def entry_config(model_config: Mapping[str, Any]) -> EntryConfig:
    """Configuration of the orchestrator from its config.pbtxt.

    Raises:
        ConfigError: names the parameter and its allowed form.
    """
    name = str(model_config["name"])
    parameters = Parameters(name, model_config.get("parameters", {}))
    parameters.take("role", str, "", "a role")
    no_names: tuple[str, ...] = ()
    models = parameters.take("models", names, no_names, "a comma-separated list of model names")
    if not models or len(set(models)) != len(models):
        raise ConfigError(f"model {name!r}: parameter models must name each model once, small first; it has {models}")
    policy = PolicySpec(
        parameters.take("policy", str, DEFAULT_POLICY.name, "a policy's name"),
        parameters.take("policy_params", json_object, DEFAULT_POLICY.params, "a JSON object"),
    )
    queue = EntryQueuePolicy(**parameters.fields(QUEUE))
    priorities = _priorities(name, parameters)
    config = EntryConfig(name, models, policy, queue=queue, priorities=priorities, **parameters.fields(_ENTRY))
    parameters.done()
    _check_replicas(config)
    if config.allow_special_tokens and config.end_ids is None:
        raise ConfigError(f"model {name!r}: allow_special_tokens needs end_ids, since each model may end otherwise")
    check_no_native_queue(name, model_config.get("dynamic_batching", {}))
    return config


def _check_replicas(config: EntryConfig) -> None:
    """Refuses replicas of unknown models, models without one, and names that stand twice."""
    routed = [name for replicas in config.all_replicas.values() for name in replicas]
    unknown = sorted(config.replicas.keys() - set(config.models))
    if unknown or not all(config.all_replicas.values()) or len(set(routed)) != len(routed):
        given = {model: list(replicas) for model, replicas in config.replicas.items()}
        raise ConfigError(
            f"model {config.name!r}: parameter replicas is {json.dumps(given)}; it names the replicas of each of "
            f"{', '.join(config.models)} that has several, each once"
        )
    if strange := sorted(config.hosts.keys() - set(routed)):
        raise ConfigError(
            f"model {config.name!r}: parameter hosts has {strange[0]!r}, to which it does not route; it routes to "
            f"{', '.join(routed)}"
        )


class _LevelPolicy(msgspec.Struct, forbid_unknown_fields=True):
    """Triton's ModelQueuePolicy in `priority_queue_policy`; what is left out has Triton's default."""

    max_queue_size: Annotated[int, msgspec.Meta(ge=0)] = 0
    default_timeout_microseconds: Annotated[int, msgspec.Meta(ge=0)] = 0
    timeout_action: Literal["REJECT", "DELAY"] = "REJECT"
    allow_timeout_override: bool = False

    def policy(self) -> EntryQueuePolicy:
        return EntryQueuePolicy(
            self.max_queue_size,
            self.default_timeout_microseconds * 1000,
            self.timeout_action == "REJECT",
            self.allow_timeout_override,
        )


def _level_policies(text: str) -> dict[int, EntryQueuePolicy]:
    found = msgspec.json.decode(text, type=dict[int, _LevelPolicy])
    return {level: policy.policy() for level, policy in found.items()}


def _priorities(model: str, parameters: Parameters) -> Priorities:
    fields = parameters.fields(_PRIORITIES)
    try:
        return Priorities(**fields)
    except ValueError as exc:
        raise ConfigError(f"model {model!r}: {exc}") from exc


_PRIORITIES: dict[str, Row] = {
    "levels": ("priority_levels", natural, "a whole number of at least 0"),
    "default": ("default_priority_level", natural, "a whole number in 1..priority_levels"),
    "policies": ("priority_queue_policy", _level_policies, 'a JSON object such as {"1": {"max_queue_size": 8}}'),
}
_ENTRY: dict[str, Row] = {
    "policy_checkpoints": ("policy_checkpoints", paths, 'a JSON list such as ["tokenrouter/1/routers/r2r.pt"]'),
    "policy_cache_bytes": POLICY_CACHE,
    "selectable": ("selectable_policies", lambda text: frozenset(names(text)), "a comma-separated list of policies"),
    "max_inflight": MAX_INFLIGHT,
    "max_request_ns": MAX_REQUEST,
    "connect_timeout_ns": ("connect_timeout_ms", milliseconds, "milliseconds, at least 1"),
    "limits": ("limits", json_as(Limits), 'a JSON object such as {"prompt_bytes": 1048576}'),
    "defaults": ("defaults", json_as(Defaults), 'a JSON object such as {"max_tokens": 256}'),
    "speculation": (
        "speculation",
        json_as(Speculation),
        'a JSON object such as {"depth": 8, "least_agreement": 0.3}; depth is at least 1, least_agreement in [0, 1]',
    ),
    "end_ids": ("end_ids", ids, "a comma-separated list of token ids"),
    "allow_added_tokens": ("allow_added_tokens", boolean, "true or false"),
    "allow_special_tokens": ("allow_special_tokens", boolean, "true or false"),
    "replicas": (
        "replicas",
        json_as(dict[str, tuple[str, ...]]),
        'a JSON object such as {"large": ["large", "large_1"]}',
    ),
    "hosts": ("hosts", hosts, 'a JSON object such as {"large": "gpu-b.example:8004"}'),
    "tls": TLS,
}
