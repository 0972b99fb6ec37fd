"""What a deployment's YAML file may say. Unknown keys and wrong types are refused with the path of the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from tokenrouter.config import load_yaml
from tokenrouter.errors import ConfigError


class QueueSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The queue in front of the entry model.

    Attributes:
        max_queue_size: most waiting requests; 0 = no limit. The names and meanings are Triton's ModelQueuePolicy's.
    """

    max_queue_size: int = 0
    default_timeout_microseconds: int = 0
    timeout_action: Literal["REJECT", "DELAY"] = "REJECT"
    allow_timeout_override: bool = True


class EntrySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry model and its ensemble; see `tokenrouter.config.EntryConfig` for the parameters."""

    policy: str
    policy_params: dict[str, Any] = {}
    name: str = "tokenrouter"
    ensemble: str | None = "ensemble"
    max_batch_size: int = 8
    max_inflight: int = 64
    connect_timeout_ms: int = 30_000
    selectable_policies: tuple[str, ...] | None = None
    allow_added_tokens: bool = False
    queue: QueueSpec = QueueSpec()


class BatchingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Delayed batching of one model; `python -m tools.dtmc apply` writes better values."""

    threshold: int = 1
    max_queue_delay_microseconds: int = 0
    batch_thresholds: dict[int, int] = {}


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One LLM.

    Attributes:
        engine: name of the engine.
        options: the engine's part of model.yaml.
        checkpoint: folder in Hugging Face format that model.yaml names; by default the version folder itself.
        batching: thresholds.
        direct_kv_share: share of the KV pool for calls that go to this model directly.
        max_inflight: most direct calls that run at once.
    """

    engine: str = "torch"
    options: dict[str, Any] = {}
    checkpoint: str = "."
    batching: BatchingSpec = BatchingSpec()
    direct_kv_share: float = 0.25
    max_inflight: int = 64


class DeploymentSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole deployment; the order of `models` is the deployment's order, small first."""

    entry: EntrySpec
    models: dict[str, ModelSpec]


def load_spec(path: Path) -> DeploymentSpec:
    """The deployment in a YAML file.

    Raises:
        ConfigError: names the file and the field.
    """
    try:
        return msgspec.convert(load_yaml(path), DeploymentSpec, strict=False)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{path}: {exc}") from exc
