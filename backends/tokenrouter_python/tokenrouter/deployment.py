"""A model repository as a whole: where its models lie, one tokenizer for all of them, and the objects built from it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenrouter.checkpoint import end_ids, load_tokenizer
from tokenrouter.config import EntryConfig, SubserverConfig, entry_config, load_yaml, role_of
from tokenrouter.engines import load_engine
from tokenrouter.engines.base import Placement
from tokenrouter.errors import ConfigError
from tokenrouter.messages import PROTOCOL_VERSION, Hello, PolicySpec
from tokenrouter.orchestrator.machine import Orchestrator, OrchestratorSettings
from tokenrouter.policies import PolicyCache
from tokenrouter.policies.base import PolicyContext
from tokenrouter.request import RequestBuilder
from tokenrouter.vocabulary import check_same_tokenizer, common_size

if TYPE_CHECKING:
    from tokenrouter.subserver.machine import Subserver


def version_folder(model: Path) -> Path:
    """The newest version folder of a model of the repository.

    Raises:
        ConfigError: there is none.
    """
    versions = [folder for folder in model.glob("*") if folder.is_dir() and folder.name.isdecimal()]
    if not versions:
        raise ConfigError(f"{model} has no version folder (1/); is the model named correctly?")
    return max(versions, key=lambda folder: int(folder.name))


def checkpoint_folder(model: Path) -> Path:
    """The checkpoint of a subserver's newest version: `model` of its model.yaml, by default the version folder."""
    folder = version_folder(model)
    return (folder / str(load_yaml(folder / "model.yaml").get("model", "."))).resolve()


class Entry:
    """What the orchestrator's role needs, built from a repository.

    Args:
        config: the entry model's configuration.
        repository: folder of the model repository.
    """

    def __init__(self, config: EntryConfig, repository: Path) -> None:
        folders = {name: checkpoint_folder(repository / name) for name in config.models}
        check_same_tokenizer(
            folders,
            allow_added_tokens=config.allow_added_tokens,
            allow_special_tokens=config.allow_special_tokens,
        )
        first = folders[config.models[0]]
        self.config = config
        self.tokenizer = load_tokenizer(first)
        self._policies = PolicyCache(PolicyContext(config.models, str(repository), {"tokenizer": self.tokenizer}))
        self._policies.get(config.policy).prepare("")
        vocab_size = common_size(folders)
        ends = end_ids(first) if config.end_ids is None else config.end_ids
        if ends and max(ends) >= vocab_size:
            raise ConfigError(f"end_ids has {max(ends)}; the models' token ids lie in [0, {vocab_size})")
        self.builder = RequestBuilder(
            tokenizer=self.tokenizer,
            vocab_size=vocab_size,
            end_ids=ends,
            policy=config.policy,
            selectable=config.selectable,
        )

    def hello(self, peer: str, share: str) -> Hello:
        """What subservers are told first; `share` is the KV quota, ``routed`` or ``direct``."""
        return Hello(PROTOCOL_VERSION, peer, share, self.config.models, self.config.policy)

    def orchestrator(self) -> Orchestrator:
        """A new state machine."""
        settings = OrchestratorSettings(
            models=self.config.models,
            max_inflight=self.config.max_inflight,
            connect_timeout_ns=self.config.connect_timeout_ns,
            queue=self.config.queue,
        )
        return Orchestrator(settings, tokenizer=self.tokenizer, policies=self._policies)


def _engine_of(model: Path) -> str | None:
    """The engine of a model of the repository, or None if it is no subserver."""
    try:
        return str(load_yaml(version_folder(model) / "model.yaml").get("engine", "torch"))
    except ConfigError:
        return None


def direct_entry(name: str, config: SubserverConfig, repository: Path) -> Entry:
    """The entry for calls that go to one subserver directly: the same code, with one model and no routing."""
    entry = EntryConfig(
        models=(name,),
        policy=PolicySpec("single"),
        selectable=frozenset(),
        max_inflight=config.max_inflight,
        connect_timeout_ns=30 * 10**9,
        queue=config.queue,
        end_ids=None,
        allow_added_tokens=False,
    )
    return Entry(entry, repository)


def placement(name: str, repository: Path) -> Placement:
    """Which entry models of the repository route to this model, and how.

    Raises:
        ConfigError: the configuration of such an entry model is wrong.
    """
    entries = [entry for folder in sorted(repository.iterdir()) if (entry := _entry_of(folder, name)) is not None]
    names = {model for entry in entries for model in entry.models}
    folders = {model: checkpoint_folder(repository / model) for model in sorted(names)}
    return Placement(
        model=name,
        repository=str(repository),
        vocab_size=common_size(folders) if folders else 0,
        policies=tuple((entry.models, entry.policy) for entry in entries),
    )


def _entry_of(folder: Path, model: str) -> EntryConfig | None:
    """The configuration of an entry model that names this model, or None if it is no such thing."""
    from tokenrouter.repository import read_model_config  # brings gRPC along, which no other engine needs

    try:
        raw = read_model_config(folder)
        if role_of(raw) != "orchestrator":
            return None
    except ConfigError:
        return None
    entry = entry_config(raw)
    return entry if model in entry.models else None


def build_subserver(name: str, config: SubserverConfig, repository: Path) -> Subserver:
    """Loads the engine and wraps it into a subserver.

    Raises:
        ConfigError: names the file and the field.
    """
    from tokenrouter.subserver.machine import Subserver  # brings torch along, which no entry model needs

    sharing = sum(_engine_of(folder) == config.engine for folder in repository.iterdir())
    engine = load_engine(
        config.engine,
        config.checkpoint,
        config.engine_options,
        sharing=max(1, sharing),
        placement=placement(name, repository) if config.engine == "tensorrt_llm" else None,
    )
    direct = int(engine.info.kv_blocks * config.direct_kv_share)
    extras: dict[str, Any] = {
        "tokenizer": load_tokenizer(config.checkpoint),
        "hidden_size": engine.info.hidden_size,
        **engine.extras(name),
    }
    return Subserver(
        name,
        engine,
        batching=config.batching,
        shares={"direct": direct, "routed": engine.info.kv_blocks - direct},
        context=lambda models: PolicyContext(models, str(repository), extras),
        clock_ns=time.monotonic_ns,
    )
