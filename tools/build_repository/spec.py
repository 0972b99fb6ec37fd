"""What a deployment's YAML file may say. Unknown keys and wrong types are refused with the path of the field."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from tokenrouter.batcher import Batching
from tokenrouter.channel.tls import TlsSettings
from tokenrouter.config.entry import EntryConfig
from tokenrouter.config.model_yaml import VERSION_FOLDER, ModelYaml
from tokenrouter.config.parameters import MAX_REQUEST_SECONDS
from tokenrouter.config.subserver import SubserverConfig
from tokenrouter.config.values import checked_paths
from tokenrouter.entry_queue import EntryQueuePolicy, Priorities
from tokenrouter.errors import ConfigError
from tokenrouter.messages import Natural
from tokenrouter.policies.cache import MAX_BYTES
from tokenrouter.request import Defaults, Limits
from tokenrouter.speculation import Speculation
from tokenrouter.yaml_files import load_yaml, merged
from tools.build_repository.aliases import SHAPE_NAMES

GIB = 1 << 30
CHECKPOINTS_VARIABLE = "TOKENROUTER_CHECKPOINTS"
_QUEUE = EntryQueuePolicy()
_BATCHING = Batching()
Positive = Annotated[int, msgspec.Meta(ge=1)]


class LevelQueueSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Triton's ModelQueuePolicy of one priority level, with Triton's defaults."""

    max_queue_size: int = 0
    default_timeout_microseconds: int = 0
    timeout_action: Literal["REJECT", "DELAY"] = "REJECT"
    allow_timeout_override: bool = False


class QueueSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The queue in front of the entry model. Names and meanings are those of Triton's ModelQueuePolicy.

    Attributes:
        max_queue_size: most waiting requests; 0 = no limit.
        priority_levels: how many priorities requests may have, 1 is served first; 0 = none. This and the next two are
            named as in Triton's ModelDynamicBatching.
        default_priority_level: of requests that name none.
        priority_queue_policy: by level, where it differs from the fields above.
    """

    max_queue_size: int = _QUEUE.max_queue_size
    default_timeout_microseconds: int = _QUEUE.default_timeout_ns // 1000
    timeout_action: Literal["REJECT", "DELAY"] = "REJECT" if _QUEUE.reject else "DELAY"
    allow_timeout_override: bool = _QUEUE.allow_timeout_override
    priority_levels: int = 0
    default_priority_level: int = 0
    priority_queue_policy: dict[int, LevelQueueSpec] = {}

    def __post_init__(self) -> None:
        """Refuses levels that do not exist."""
        Priorities(self.priority_levels, self.default_priority_level, dict.fromkeys(self.priority_queue_policy, _QUEUE))


class AliasSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Another model under which the entry model is called; docs/clients.md says who needs which.

    Attributes:
        shape: whose tensors it has, see `aliases.SHAPES`.
        decoupled: whether it may stream; one that may not is called with `infer`, and needs `entry.unary`.
    """

    shape: str = "tensorrt_llm_bls"
    decoupled: bool = True

    def __post_init__(self) -> None:
        """Refuses shapes that there are not."""
        if self.shape not in SHAPE_NAMES:
            raise ValueError(f"shape is {self.shape!r}; known: {', '.join(SHAPE_NAMES)}")


_ALIASES = {name: AliasSpec(name) for name in ("ensemble", "tensorrt_llm_bls")}


class EntrySpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry model and its other names; see `tokenrouter.config.EntryConfig` for the parameters.

    Attributes:
        aliases: by name.
        unary: name of a second entry model that answers with one response, for clients without streams, or None.
        routers: trained router by policy: a file, which is copied into the repository, or a folder, which is linked
            there. The one of `policy` becomes its parameter `checkpoint`.
        max_request_seconds: every request has ended so long after its arrival, with an error; 0 = no limit.
        policy_checkpoints: files and folders in the repository, relative to it, that clients may name as `checkpoint`
            in `policy_params`; those of `routers` are among them.
        policy_cache_mib: most that loaded policies hold in the entry model; whose turn was longest ago makes room.
        speculation: whether and how far the small model goes ahead of the large one; see
            `tokenrouter.speculation.Speculation`. Left out, only for requests that ask for it.
        limits: what one request may hold; see `tokenrouter.request.Limits`.
        defaults: of fields that a request leaves out; see `tokenrouter.request.Defaults`.
        routed_orchestrators: how many such entry models, each in a server of its own, share the models; each has its
            part of the KV for routed requests.
    """

    policy: str
    policy_params: dict[str, Any] = {}
    routers: dict[str, str] = {}
    name: str = "tokenrouter"
    aliases: dict[str, AliasSpec] = msgspec.field(default_factory=lambda: dict(_ALIASES))
    unary: str | None = None
    max_batch_size: int = 8
    max_inflight: int = EntryConfig.max_inflight
    connect_timeout_ms: int = EntryConfig.connect_timeout_ns // 10**6
    max_request_seconds: Natural = MAX_REQUEST_SECONDS
    policy_checkpoints: tuple[str, ...] = ()
    policy_cache_mib: Positive = MAX_BYTES >> 20
    selectable_policies: tuple[str, ...] | None = None
    end_ids: tuple[int, ...] | None = EntryConfig.end_ids
    allow_added_tokens: bool = EntryConfig.allow_added_tokens
    allow_special_tokens: bool = EntryConfig.allow_special_tokens
    queue: QueueSpec = QueueSpec()
    speculation: Speculation | None = EntryConfig.speculation
    limits: Limits = Limits()
    defaults: Defaults = Defaults()
    routed_orchestrators: Positive = SubserverConfig.routed_orchestrators

    def __post_init__(self) -> None:
        """Refuses checkpoints outside of the repository."""
        checked_paths(self.policy_checkpoints)


class BatchingSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Delayed batching of one model; `tuning` finds better values."""

    threshold: int = _BATCHING.threshold
    max_queue_delay_microseconds: int = _BATCHING.max_queue_delay_ns // 1000
    batch_thresholds: dict[int, int] = {}


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One LLM.

    Attributes:
        engine: name of the engine.
        options: the engine's part of model.yaml; what is left out is filled in (see `arguments`).
        checkpoint: folder in Hugging Face format; by default the version folder itself.
        gpus: indices of the GPUs it is split over; several models of one host may share one.
        batching: thresholds.
        direct_kv_share: share of the KV pool for calls that go to this model directly.
        unary_kv_share: likewise for those of `entry.unary`, if there is one.
        max_inflight: most direct calls that run at once.
        max_request_seconds: as of the entry model, for direct calls.
        policy_cache_mib: as of the entry model; weights of routers are mostly here.
        extend_tokens: tokens that a step usually takes in beyond one per request (`tensorrt_llm`: CUDA graphs are
            captured for numbers of tokens up to max_batch_size + extend_tokens).
        load_after: models that load before this one if they are there; computed for models that share GPUs.
        replicas: how many of it there are. The first has the model's name, the others `NAME_1`, `NAME_2`, ...; `gpus`
            names those of all of them in this order.
        host: the host that serves it, as `host` or `host:port` (8004); of several replicas a list, and `gpus` are then
            those of each. Left out, the entry model's.
        listen: where it listens, if the host's own name for itself is another one, as in a container.
    """

    engine: str = ModelYaml.engine
    options: dict[str, Any] = {}
    checkpoint: str = VERSION_FOLDER
    gpus: tuple[int, ...] = ()
    batching: BatchingSpec = BatchingSpec()
    direct_kv_share: float = SubserverConfig.direct_kv_share
    unary_kv_share: float = 0.25
    max_inflight: int = SubserverConfig.max_inflight
    max_request_seconds: Natural = MAX_REQUEST_SECONDS
    policy_cache_mib: Positive = MAX_BYTES >> 20
    extend_tokens: int = 64
    load_after: tuple[str, ...] = ()
    replicas: Positive = 1
    host: str | tuple[str, ...] = ""
    listen: str = ""


class KvBudgetSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Memory that models which name their GPUs may take; see `kv_budget`.

    Attributes:
        gpu_memory_gib: memory of every GPU, or by GPU.
        share: of it, in (0, 1].
        reserve_gib: per model and GPU, for activations, CUDA context and graphs.
    """

    gpu_memory_gib: float | dict[int, float] = 80.0
    share: float = 0.9
    reserve_gib: float = 4.0

    def __post_init__(self) -> None:
        """Refuses shares outside (0, 1]."""
        if not 0.0 < self.share <= 1.0 or self.reserve_gib < 0.0:
            raise ValueError("share lies in (0, 1], reserve_gib is at least 0")

    def budget(self, gpu: int) -> int:
        """Bytes that the models may take on this GPU.

        Raises:
            ConfigError: the GPU's memory is not given.
        """
        memory = self.gpu_memory_gib.get(gpu) if isinstance(self.gpu_memory_gib, dict) else self.gpu_memory_gib
        if memory is None:
            raise ConfigError(
                f"kv_budget.gpu_memory_gib has no entry for GPU {gpu}; add it, or give one number for all"
            )
        return int(memory * self.share * GIB)

    @property
    def reserve(self) -> int:
        """Bytes."""
        return int(self.reserve_gib * GIB)


class TuningSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Thresholds from a profile (`tools.dtmc.profile`), searched for every number in flight up to `inflight`."""

    profile: str
    inflight: int

    def __post_init__(self) -> None:
        """Refuses a table without rows."""
        if self.inflight < 1:
            raise ValueError("inflight is at least 1")


class DeploymentSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole deployment; the order of `models` is the deployment's order, small first.

    Attributes:
        checkpoints: folder that relative checkpoints and routers are relative to; by default that of the YAML file.
        tls: how hosts trust each other, if there are several; see `tokenrouter.channel.tls.TlsSettings`.
        tuned: models whose thresholds `tools.dtmc apply` or `tools.tune` found, and the entry model if its speculation
            was; they write it into a built repository.
    """

    entry: EntrySpec
    models: dict[str, ModelSpec]
    checkpoints: str = "."
    kv_budget: KvBudgetSpec = KvBudgetSpec()
    tuning: TuningSpec | None = None
    tls: TlsSettings = TlsSettings()
    tuned: tuple[str, ...] = ()


def load_spec(path: Path, checkpoints: Path | None = None, overlay: Path | None = None) -> DeploymentSpec:
    """The deployment in a YAML file, all its paths absolute.

    Args:
        path: the file.
        checkpoints: overrides the file's `checkpoints`, as does the environment variable TOKENROUTER_CHECKPOINTS.
        overlay: another YAML file whose fields replace those of the first, or join them.

    Raises:
        ConfigError: names the file and the field.
    """
    content, files = load_yaml(path), str(path)
    if overlay is not None:
        content, files = merged(content, load_yaml(overlay)), f"{path} with {overlay}"
    try:
        spec = msgspec.convert(content, DeploymentSpec, strict=False)
    except msgspec.ValidationError as exc:
        raise ConfigError(f"{files}: {exc}") from exc
    folder = path.absolute().parent
    given = checkpoints or os.environ.get(CHECKPOINTS_VARIABLE)
    base = Path(given).absolute() if given else folder / spec.checkpoints
    return _with_paths(spec, base, folder)


def _with_paths(spec: DeploymentSpec, base: Path, folder: Path) -> DeploymentSpec:
    """The same with absolute paths: checkpoints and routers from `base`, the profile from `folder`."""

    def absolute(path: str, root: Path = base) -> str:
        return os.path.normpath(root / Path(path).expanduser())

    models = {
        name: model
        if model.checkpoint == VERSION_FOLDER
        else msgspec.structs.replace(model, checkpoint=absolute(model.checkpoint))
        for name, model in spec.models.items()
    }
    routers = {policy: absolute(router) for policy, router in spec.entry.routers.items()}
    tuning = spec.tuning and msgspec.structs.replace(spec.tuning, profile=absolute(spec.tuning.profile, folder))
    entry = msgspec.structs.replace(spec.entry, routers=routers)
    return msgspec.structs.replace(spec, models=models, entry=entry, tuning=tuning, checkpoints=str(base))
