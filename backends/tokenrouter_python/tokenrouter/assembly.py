"""Puts an orchestrator or a subserver together from a model repository: where server and offline engine begin."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from tokenrouter.checkpoint import end_ids, load_tokenizer
from tokenrouter.config.entry import DEFAULT_POLICY, EntryConfig
from tokenrouter.config.subserver import SubserverConfig
from tokenrouter.engines import load_engine, load_tensorrt_llm
from tokenrouter.engines.base import KvEngine, Placement
from tokenrouter.errors import ConfigError
from tokenrouter.messages import Hello, PolicySpec
from tokenrouter.orchestrator.machine import Orchestrator
from tokenrouter.orchestrator.settings import OrchestratorSettings
from tokenrouter.policies import PolicyCache
from tokenrouter.policies.base import PolicyContext
from tokenrouter.policies.cache import attempt
from tokenrouter.protocol_version import OLDEST_VERSION, PROTOCOL_VERSION
from tokenrouter.repository import Repository
from tokenrouter.request import RequestBuilder
from tokenrouter.vocabulary import check_same_tokenizer, common_size

if TYPE_CHECKING:
    from tokenrouter.subserver.machine import Subserver
    from tokenrouter.subserver.runner import Runner


log = logging.getLogger(__name__)


class Entry:
    """What the orchestrator's role needs, built from a repository.

    Args:
        config: the entry model's configuration.
        repository: where its models are.
    """

    def __init__(self, config: EntryConfig, repository: Repository) -> None:
        folders = {name: repository.checkpoint(name) for name in config.models}
        check_same_tokenizer(
            folders,
            allow_added_tokens=config.allow_added_tokens,
            allow_special_tokens=config.allow_special_tokens,
            compare_ends=config.end_ids is None,
        )
        first = folders[config.models[0]]
        self.config = config
        self.root = repository.root
        self.digest = repository.digest
        self.tokenizer = load_tokenizer(first)
        context = PolicyContext(
            config.models, str(repository.root), checkpoints=_nameable(config), tokenizer=self.tokenizer
        )
        self._policies = PolicyCache(context, most_bytes=config.policy_cache_bytes, prepared_for="")
        policy = self._policies.pin(config.policy)
        self._preload_classifiers()
        if config.speculation is not None and not (len(policy.models) == 2 and policy.speculates()):
            raise ConfigError(
                f"model {config.name!r}: parameter speculation is set, but policy {config.policy.name!r} cannot go "
                "ahead: its decisions need more than logits, hidden states and tokens of two models; leave it out"
            )
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
            limits=config.limits,
            defaults=config.defaults,
        )

    def _preload_classifiers(self) -> None:
        """Loads the classifiers that clients may name: their libraries hold Python's lock while they are imported."""
        for path in self.config.policy_checkpoints:
            if (self.root / path / "config.json").is_file():
                params = msgspec.json.encode({"router": "bert", "checkpoint": path}).decode()
                outcome = attempt(partial(self._policies.get, PolicySpec("query_level", params)))
                if isinstance(outcome, Exception):
                    log.warning("checkpoint %s of policy_checkpoints: %s", path, outcome)

    def hello(self, peer: str, share: str) -> Hello:
        """What subservers are told first; `share` is the KV quota, ``routed`` or ``direct``."""
        return Hello(PROTOCOL_VERSION, peer, share, self.config.models, self.config.policy, OLDEST_VERSION)

    def orchestrator(self) -> Orchestrator:
        """A new state machine."""
        settings = OrchestratorSettings(
            models=self.config.models,
            max_inflight=self.config.max_inflight,
            connect_timeout_ns=self.config.connect_timeout_ns,
            queue=self.config.queue,
            priorities=self.config.priorities,
            max_request_ns=self.config.max_request_ns,
            speculation=self.config.speculation,
            replicas=self.config.replicas,
        )
        orchestrator = Orchestrator(settings, tokenizer=self.tokenizer, policies=self._policies)
        if self._policies.get(self.config.policy).speculates():
            orchestrator.speculation.track(self.config.policy.name)
        return orchestrator


def _nameable(config: EntryConfig) -> frozenset[str]:
    """Checkpoints that policy parameters may name: those that the deployment lists, and that of its own policy."""
    own = msgspec.json.decode(config.policy.params or "{}").get("checkpoint")
    return frozenset([*config.policy_checkpoints, *([own] if own and isinstance(own, str) else [])])


def direct_entry(config: SubserverConfig, repository: Repository) -> Entry:
    """The entry for calls that go to one subserver directly: the same code, with one model and no routing."""
    entry = EntryConfig(
        name=config.name,
        models=(config.model,),
        replicas={config.model: (config.name,)},
        policy=DEFAULT_POLICY,
        selectable=frozenset(),
        max_inflight=config.max_inflight,
        queue=config.queue,
        max_request_ns=config.max_request_ns,
    )
    return Entry(entry, repository)


def placement(config: SubserverConfig, repository: Repository) -> Placement:
    """Which entry models of the repository route to this model, and how.

    Raises:
        ConfigError: the configuration of such an entry model is wrong.
    """
    entries = repository.entries_to(config.name)
    folders = {model: repository.checkpoint(model) for model in sorted({m for entry in entries for m in entry.models})}
    return Placement(
        model=config.model,
        repository=str(repository.root),
        vocab_size=common_size(folders) if folders else 0,
        policies=tuple((entry.models, entry.policy) for entry in entries),
    )


def build_subserver(
    config: SubserverConfig, repository: Repository, *, clock_ns: Callable[[], int] = time.monotonic_ns
) -> Subserver:
    """Loads the engine and wraps it into a subserver; `clock_ns` is that of its loop.

    Raises:
        ConfigError: names the file and the field.
    """
    from tokenrouter.subserver.machine import Subserver  # brings torch along, which no entry model needs

    runner = _load_runner(config, repository, clock_ns)
    engine = runner.engine
    blocks = engine.info.kv_blocks
    own = {"direct": int(blocks * config.direct_kv_share), "unary": int(blocks * config.unary_kv_share)}
    routed = (blocks - sum(own.values())) // config.routed_orchestrators
    own["unary"] //= config.routed_orchestrators
    context = PolicyContext(
        (),
        str(repository.root),
        tokenizer=load_tokenizer(config.checkpoint),
        hidden_size=engine.info.hidden_size,
        **engine.extras(config.model),
    )
    return Subserver(
        config.name,
        runner,
        shares={**own, "routed": routed},
        context=lambda models: replace(context, models=models),
        policy_cache_bytes=config.policy_cache_bytes,
        model=config.model,
        # Within one server two may be there for a moment, while an entry model is loaded again.
        orchestrators=config.routed_orchestrators if config.host or config.routed_orchestrators > 1 else 0,
    )


def _load_runner(config: SubserverConfig, repository: Repository, clock_ns: Callable[[], int]) -> Runner[KvEngine]:
    """The engine, and what runs visits on an engine of this kind."""
    from tokenrouter.subserver.stepped import SteppingRunner
    from tokenrouter.subserver.submitted import SubmittingRunner

    if config.engine == "tensorrt_llm":
        owns_loop = load_tensorrt_llm(config.checkpoint, config.engine_options, placement(config, repository))
        return SubmittingRunner(owns_loop, config.batching, clock_ns=clock_ns)
    # Those on other hosts have cores of their own.
    sharing = max(1, repository.engines(repository.host(config.name)).count(config.engine))
    stepped = load_engine(config.engine, config.checkpoint, config.engine_options, sharing=sharing)
    return SteppingRunner(stepped, config.batching, clock_ns=clock_ns)
