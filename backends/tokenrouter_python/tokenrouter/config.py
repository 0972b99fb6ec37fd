"""Configuration of the two roles: Triton's config.pbtxt (as the dict that Triton hands over) and model.yaml.

Unknown keys are refused by name; values are resolved once into frozen objects with the unit in the name. Their defaults
hold wherever a value is left out: in these files, and in the YAML file that `tools.build_repository` reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from tokenrouter.batcher import Batching
from tokenrouter.channel.address import Address
from tokenrouter.channel.tls import TlsSettings
from tokenrouter.entry_queue import EntryQueuePolicy, Priorities
from tokenrouter.errors import ConfigError
from tokenrouter.messages import PolicySpec
from tokenrouter.policies import BUILTIN
from tokenrouter.policies.cache import MAX_BYTES
from tokenrouter.request import Defaults, Limits
from tokenrouter.speculation import Speculation
from tokenrouter.yaml_files import load_yaml

T = TypeVar("T")
_Row = tuple[str, Callable[[str], Any], str]

ENTRY_ROLES = ("orchestrator", "unary", "preprocessing", "postprocessing")
"""Of models with the parameters of an entry model: itself, and what some clients need beside it (docs/clients.md)."""
ROLES = (*ENTRY_ROLES, "subserver")
ENGINES = ("emulated", "tensorrt_llm", "torch")
DEFAULT_POLICY = PolicySpec("single")
# `model` of a model.yaml whose checkpoint lies beside it.
VERSION_FOLDER = "."
# Of the torch engine, and what Triton is told where an engine's options name no batch size.
MAX_BATCH_SIZE = 16
# Of torch and emulated engines.
TOKENS_PER_BLOCK = 16
# Triton tells no model that a non-streamed HTTP client went away; its request holds KV no longer than this.
MAX_REQUEST_SECONDS = 3600


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


@dataclass(frozen=True)
class SubserverConfig:
    """A subserver's configuration.

    Attributes:
        name: the model's name.
        engine: name of the engine.
        checkpoint: the checkpoint's folder.
        engine_options: everything else in model.yaml.
        batching: thresholds of delayed batching.
        direct_kv_share: share of the KV pool for calls that go to this model directly, in [0, 1).
        unary_kv_share: likewise for those of an entry model without streams (role `unary`).
        max_inflight: most direct calls that run at once.
        queue: queue of direct calls.
        max_request_ns: as in `EntryConfig`, of direct calls.
        policy_cache_bytes: as in `EntryConfig`; weights of routers are mostly here.
        load_after: models that load their engine before this one, if they load at all (`load_after` in model.yaml).
        replica_of: the model that it is a replica of (`replica_of`), if that has another name.
        routed_orchestrators: how many entry models share the KV that is left for routed requests; each has its part.
        host: where orchestrators of other hosts find it (`host`); None: they do not.
        listen: where it listens for them, if that is another address (`listen`).
        tls: as in `EntryConfig`.
    """

    name: str
    engine: str
    checkpoint: Path
    engine_options: dict[str, Any]
    batching: Batching = field(default_factory=Batching)
    direct_kv_share: float = 0.25
    unary_kv_share: float = 0.0
    max_inflight: int = 64
    queue: EntryQueuePolicy = field(default_factory=EntryQueuePolicy)
    max_request_ns: int = MAX_REQUEST_SECONDS * 10**9
    policy_cache_bytes: int = MAX_BYTES
    load_after: tuple[str, ...] = ()
    replica_of: str = ""
    routed_orchestrators: int = 1
    host: Address | None = None
    listen: Address | None = None
    tls: TlsSettings = field(default_factory=TlsSettings)

    @property
    def model(self) -> str:
        """The model that it is, or is a replica of: the name that policies know."""
        return self.replica_of or self.name


@dataclass(frozen=True)
class ModelYaml:
    """model.yaml of a version folder; what `SubserverConfig` takes from it.

    Attributes:
        options: everything else, which is the engine's.
    """

    checkpoint: Path
    options: dict[str, Any]
    engine: str = "torch"
    load_after: tuple[str, ...] = ()

    @classmethod
    def read(cls, folder: Path) -> ModelYaml:
        """That of a version folder.

        Raises:
            ConfigError: names the file and the field.
        """
        path = folder / "model.yaml"
        options = load_yaml(path)
        engine = str(options.pop("engine", cls.engine))
        if engine not in ENGINES:
            raise ConfigError(f"{path}: engine is {engine!r}; known: {', '.join(ENGINES)}")
        checkpoint = (folder / str(options.pop("model", VERSION_FOLDER))).resolve()
        load_after = _model_names(options.pop("load_after", list(cls.load_after)), path)
        return cls(checkpoint, options, engine, load_after)


class _Parameters:
    """The `parameters` of a config.pbtxt; every key is taken once, what is left over is unknown."""

    def __init__(self, model: str, raw: Mapping[str, Any]) -> None:
        self._model = model
        self._raw = {key: str(value.get("string_value", "")) for key, value in raw.items()}
        self._known: list[str] = []

    def take(self, key: str, parse: Callable[[str], T], default: T, form: str) -> T:
        """The parsed value of a parameter, or the default if it is absent."""
        self._known.append(key)
        text = self._raw.pop(key, None)
        if text is None:
            return default
        try:
            return parse(text)
        except (ValueError, TypeError, KeyError) as exc:
            raise ConfigError(f"model {self._model!r}: parameter {key} is {text!r}; it is {form}") from exc

    def fields(self, rows: Mapping[str, _Row]) -> dict[str, Any]:
        """The fields of a configuration whose parameters are there; for the others its own defaults hold."""
        absent: Any = object()
        values = {name: self.take(key, parse, absent, form) for name, (key, parse, form) in rows.items()}
        return {name: value for name, value in values.items() if value is not absent}

    def done(self) -> None:
        if self._raw:
            raise ConfigError(
                f"model {self._model!r}: unknown parameter {sorted(self._raw)[0]!r} in config.pbtxt; "
                f"known: {', '.join(sorted(self._known))}"
            )


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


def entry_config(model_config: Mapping[str, Any]) -> EntryConfig:
    """Configuration of the orchestrator from its config.pbtxt.

    Raises:
        ConfigError: names the parameter and its allowed form.
    """
    name = str(model_config["name"])
    parameters = _Parameters(name, model_config.get("parameters", {}))
    parameters.take("role", str, "", "a role")
    no_names: tuple[str, ...] = ()
    models = parameters.take("models", _names, no_names, "a comma-separated list of model names")
    if not models or len(set(models)) != len(models):
        raise ConfigError(f"model {name!r}: parameter models must name each model once, small first; it has {models}")
    policy = PolicySpec(
        parameters.take("policy", str, DEFAULT_POLICY.name, "a policy's name"),
        parameters.take("policy_params", _json_object, DEFAULT_POLICY.params, "a JSON object"),
    )
    queue = EntryQueuePolicy(**parameters.fields(_QUEUE))
    priorities = _priorities(name, parameters)
    config = EntryConfig(name, models, policy, queue=queue, priorities=priorities, **parameters.fields(_ENTRY))
    parameters.done()
    _check_replicas(config)
    if config.allow_special_tokens and config.end_ids is None:
        raise ConfigError(f"model {name!r}: allow_special_tokens needs end_ids, since each model may end otherwise")
    _check_no_native_queue(name, model_config.get("dynamic_batching", {}))
    return config


def _check_replicas(config: EntryConfig) -> None:
    """Refuses replicas of unknown models, models without one, and names that stand twice."""
    names = [name for replicas in config.all_replicas.values() for name in replicas]
    unknown = sorted(config.replicas.keys() - set(config.models))
    if unknown or not all(config.all_replicas.values()) or len(set(names)) != len(names):
        given = {model: list(replicas) for model, replicas in config.replicas.items()}
        raise ConfigError(
            f"model {config.name!r}: parameter replicas is {json.dumps(given)}; it names the replicas of each of "
            f"{', '.join(config.models)} that has several, each once"
        )
    if strange := sorted(config.hosts.keys() - set(names)):
        raise ConfigError(
            f"model {config.name!r}: parameter hosts has {strange[0]!r}, to which it does not route; it routes to "
            f"{', '.join(names)}"
        )


def subserver_config(model_config: Mapping[str, Any], folder: Path) -> SubserverConfig:
    """Configuration of a subserver from its config.pbtxt and the model.yaml in its version folder.

    Raises:
        ConfigError: names the file, the field and its allowed form.
    """
    name = str(model_config["name"])
    parameters = _Parameters(name, model_config.get("parameters", {}))
    parameters.take("role", str, "", "'subserver'")
    table = parameters.fields(_TABLE)
    fields = parameters.fields(_SUBSERVER)
    queue = EntryQueuePolicy(**parameters.fields(_QUEUE))
    parameters.done()
    if fields.get("direct_kv_share", SubserverConfig.direct_kv_share) + fields.get("unary_kv_share", 0.0) >= 1.0:
        raise ConfigError(f"model {name!r}: direct_kv_share and unary_kv_share leave nothing for the entry model")
    dynamic_batching = model_config.get("dynamic_batching", {})
    _check_no_native_queue(name, dynamic_batching)
    model = ModelYaml.read(folder)
    return SubserverConfig(
        name,
        model.engine,
        model.checkpoint,
        model.options,
        batching=_batching(name, dynamic_batching, table),
        queue=queue,
        load_after=model.load_after,
        **fields,
    )


def merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`defaults` with what is `given`; mappings in both are merged."""
    result = dict(defaults)
    for key, value in given.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _batching(name: str, dynamic_batching: Mapping[str, Any], table: dict[str, Any]) -> Batching:
    fields = dict(table)
    if sizes := dynamic_batching.get("preferred_batch_size"):
        fields["threshold"] = min(int(size) for size in sizes)
    if delay := dynamic_batching.get("max_queue_delay_microseconds"):
        fields["max_queue_delay_ns"] = int(delay) * 1000
    try:
        return Batching(**fields)
    except ConfigError as exc:
        raise ConfigError(f"model {name!r}: {exc}") from exc


def _check_no_native_queue(name: str, batching: Mapping[str, Any]) -> None:
    if batching.get("default_queue_policy") or batching.get("priority_levels"):
        raise ConfigError(
            f"model {name!r}: dynamic_batching has a queue policy or priorities, which this backend does not use; set "
            "max_queue_size, default_timeout_microseconds, timeout_action, allow_timeout_override (and in the entry "
            "model priority_levels, default_priority_level, priority_queue_policy) as parameters instead"
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


def _priorities(model: str, parameters: _Parameters) -> Priorities:
    fields = parameters.fields(_PRIORITIES)
    try:
        return Priorities(**fields)
    except ValueError as exc:
        raise ConfigError(f"model {model!r}: {exc}") from exc


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _model_names(value: Any, path: Path) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise ConfigError(f"{path}: load_after is {value!r}; it is a list of model names")
    return tuple(value)


def _ids(text: str) -> tuple[int, ...]:
    ids = tuple(int(name) for name in _names(text))
    if ids and min(ids) < 0:
        raise ValueError(text)
    return ids


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def _rejects(text: str) -> bool:
    return {"REJECT": True, "DELAY": False}[text]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < 1.0:
        raise ValueError(text)
    return value


def _json_object(text: str) -> str:
    if not isinstance(json.loads(text), dict):
        raise ValueError(text)
    return text


def _mebibytes(text: str) -> int:
    return _positive(text) << 20


def _paths(text: str) -> tuple[str, ...]:
    return checked_paths(msgspec.json.decode(text, type=tuple[str, ...]))


def checked_paths(paths: tuple[str, ...]) -> tuple[str, ...]:
    """The same. Raises ValueError for a path that is not one in the repository."""
    for path in paths:
        if not path or PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
            raise ValueError(f"policy_checkpoints has {path!r}; name files in the repository, relative to it")
    return paths


def _limits(text: str) -> Limits:
    return msgspec.json.decode(text, type=Limits)


def _defaults(text: str) -> Defaults:
    return msgspec.json.decode(text, type=Defaults)


def _speculation(text: str) -> Speculation:
    return msgspec.json.decode(text, type=Speculation)


def _thresholds(text: str) -> dict[int, int]:
    return msgspec.json.decode(text, type=dict[int, int])


def _replicas(text: str) -> dict[str, tuple[str, ...]]:
    return msgspec.json.decode(text, type=dict[str, tuple[str, ...]])


def _hosts(text: str) -> dict[str, Address]:
    found = msgspec.json.decode(text, type=dict[str, str])
    return {name: Address.parse(host) for name, host in found.items()}


def _tls(text: str) -> TlsSettings:
    return msgspec.json.decode(text, type=TlsSettings)


def _microseconds(text: str) -> int:
    return _natural(text) * 1000


def _seconds(text: str) -> int:
    return _natural(text) * 10**9


def _milliseconds(text: str) -> int:
    return _positive(text) * 10**6


# Field of the configuration -> parameter of config.pbtxt, its parser, and what it is.
_QUEUE: dict[str, _Row] = {
    "max_queue_size": ("max_queue_size", _natural, "a whole number of at least 0"),
    "default_timeout_ns": ("default_timeout_microseconds", _microseconds, "a whole number of at least 0"),
    "reject": ("timeout_action", _rejects, "REJECT or DELAY"),
    "allow_timeout_override": ("allow_timeout_override", _boolean, "true or false"),
}
_PRIORITIES: dict[str, _Row] = {
    "levels": ("priority_levels", _natural, "a whole number of at least 0"),
    "default": ("default_priority_level", _natural, "a whole number in 1..priority_levels"),
    "policies": ("priority_queue_policy", _level_policies, 'a JSON object such as {"1": {"max_queue_size": 8}}'),
}
_MAX_REQUEST: _Row = ("max_request_seconds", _seconds, "seconds, at least 0; 0 = no limit")
_TLS: _Row = ("tls", _tls, 'a JSON object such as {"folder": "/etc/tokenrouter/tls", "peers": ["entry.example"]}')
_POLICY_CACHE: _Row = ("policy_cache_mib", _mebibytes, "MiB, at least 1")
_ENTRY: dict[str, _Row] = {
    "policy_checkpoints": ("policy_checkpoints", _paths, 'a JSON list such as ["tokenrouter/1/routers/r2r.pt"]'),
    "policy_cache_bytes": _POLICY_CACHE,
    "selectable": ("selectable_policies", lambda text: frozenset(_names(text)), "a comma-separated list of policies"),
    "max_inflight": ("max_inflight", _positive, "a whole number of at least 1"),
    "max_request_ns": _MAX_REQUEST,
    "connect_timeout_ns": ("connect_timeout_ms", _milliseconds, "milliseconds, at least 1"),
    "limits": ("limits", _limits, 'a JSON object such as {"prompt_bytes": 1048576}'),
    "defaults": ("defaults", _defaults, 'a JSON object such as {"max_tokens": 256}'),
    "speculation": (
        "speculation",
        _speculation,
        'a JSON object such as {"depth": 8, "least_agreement": 0.3}; depth is at least 1, least_agreement in [0, 1]',
    ),
    "end_ids": ("end_ids", _ids, "a comma-separated list of token ids"),
    "allow_added_tokens": ("allow_added_tokens", _boolean, "true or false"),
    "allow_special_tokens": ("allow_special_tokens", _boolean, "true or false"),
    "replicas": ("replicas", _replicas, 'a JSON object such as {"large": ["large", "large_1"]}'),
    "hosts": ("hosts", _hosts, 'a JSON object such as {"large": "gpu-b.example:8004"}'),
    "tls": _TLS,
}
_SUBSERVER: dict[str, _Row] = {
    "direct_kv_share": ("direct_kv_share", _share, "a number in [0, 1)"),
    "unary_kv_share": ("unary_kv_share", _share, "a number in [0, 1)"),
    "max_inflight": ("max_inflight", _positive, "a whole number of at least 1"),
    "max_request_ns": _MAX_REQUEST,
    "policy_cache_bytes": _POLICY_CACHE,
    "replica_of": ("replica_of", str, "a model's name"),
    "routed_orchestrators": ("routed_orchestrators", _positive, "a whole number of at least 1"),
    "host": ("host", Address.parse, "a host or host:port"),
    "listen": ("listen", Address.parse, "a host or host:port"),
    "tls": _TLS,
}
_TABLE: dict[str, _Row] = {
    "by_in_flight": ("batch_thresholds", _thresholds, 'a JSON object such as {"1": 1, "8": 4}'),
}
