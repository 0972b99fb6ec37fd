"""A subserver's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenrouter.batcher import Batching
from tokenrouter.channel.address import Address
from tokenrouter.channel.tls import TlsSettings
from tokenrouter.config.model_yaml import ModelYaml
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
from tokenrouter.config.values import json_as, positive, share
from tokenrouter.entry_queue import EntryQueuePolicy
from tokenrouter.errors import ConfigError
from tokenrouter.policies.cache import MAX_BYTES


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


def subserver_config(model_config: Mapping[str, Any], folder: Path) -> SubserverConfig:
    """Configuration of a subserver from its config.pbtxt and the model.yaml in its version folder.

    Raises:
        ConfigError: names the file, the field and its allowed form.
    """
    name = str(model_config["name"])
    parameters = Parameters(name, model_config.get("parameters", {}))
    parameters.take("role", str, "", "'subserver'")
    table = parameters.fields(_TABLE)
    fields = parameters.fields(_SUBSERVER)
    queue = EntryQueuePolicy(**parameters.fields(QUEUE))
    parameters.done()
    if fields.get("direct_kv_share", SubserverConfig.direct_kv_share) + fields.get("unary_kv_share", 0.0) >= 1.0:
        raise ConfigError(f"model {name!r}: direct_kv_share and unary_kv_share leave nothing for the entry model")
    dynamic_batching = model_config.get("dynamic_batching", {})
    check_no_native_queue(name, dynamic_batching)
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


_SUBSERVER: dict[str, Row] = {
    "direct_kv_share": ("direct_kv_share", share, "a number in [0, 1)"),
    "unary_kv_share": ("unary_kv_share", share, "a number in [0, 1)"),
    "max_inflight": MAX_INFLIGHT,
    "max_request_ns": MAX_REQUEST,
    "policy_cache_bytes": POLICY_CACHE,
    "replica_of": ("replica_of", str, "a model's name"),
    "routed_orchestrators": ("routed_orchestrators", positive, "a whole number of at least 1"),
    "host": ("host", Address.parse, "a host or host:port"),
    "listen": ("listen", Address.parse, "a host or host:port"),
    "tls": TLS,
}
_TABLE: dict[str, Row] = {
    "by_in_flight": ("batch_thresholds", json_as(dict[int, int]), 'a JSON object such as {"1": 1, "8": 4}'),
}
