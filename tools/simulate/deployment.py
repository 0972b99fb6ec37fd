"""The production state machines of a deployment, with virtual engines and clocks, built from a profile."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tokenrouter.batcher import Batching
from tokenrouter.entry_queue import EntryQueuePolicy
from tokenrouter.messages import Hello, PolicySpec
from tokenrouter.orchestrator.machine import Orchestrator
from tokenrouter.orchestrator.settings import OrchestratorSettings
from tokenrouter.policies import PolicyCache
from tokenrouter.policies.base import PolicyContext
from tokenrouter.protocol_version import PROTOCOL_VERSION
from tokenrouter.replicas import replica_names
from tokenrouter.speculation import Speculation
from tokenrouter.subserver.machine import Subserver
from tokenrouter.subserver.stepped import SteppingRunner
from tools.dtmc.errors import ProfileError, ThresholdError
from tools.dtmc.profile import Profile
from tools.simulate.engine import UNLIMITED, VirtualClock, VirtualEngine

PEER = 1
PEER_NAME = "simulator"
NEVER_NS = 1 << 62

Thresholds = Mapping[str, "int | Mapping[int, int]"]
"""Per model a threshold, or a table from requests in flight to threshold. A model that is left out has 1 (eager)."""


Replicas = Mapping[str, int]
"""How many there are of each model; a model that is left out has 1."""


@dataclass(frozen=True)
class Deployment:
    """An orchestrator connected to its subservers, one per replica, in the profile's order.

    Attributes:
        subservers: of the first model, then of the next, and so on.
        model_of: index of each one's model.
        clocks: of each.
        policy: that routes as the profile says.
    """

    orchestrator: Orchestrator
    subservers: tuple[Subserver, ...]
    model_of: tuple[int, ...]
    clocks: tuple[VirtualClock, ...]
    policy: PolicySpec


def build_deployment(
    profile: Profile,
    *,
    max_inflight: int,
    thresholds: Thresholds,
    max_queue_delay_ns: int | None,
    speculation: Speculation | None = None,
    agreement: float = 1.0,
    replicas: Replicas | None = None,
    limited_kv: bool = False,
) -> Deployment:
    """Builds and connects everything.

    Args:
        thresholds: of every replica of a model.
        speculation: how far the profile's first model goes ahead of the second.
        agreement: how often the models after the first write the token that the first one would have written.
        replicas: of each model.
        limited_kv: whether the profile's `kv_tokens` hold. Endless responses fit nowhere.

    Raises:
        ProfileError: a move commits neither 0 nor 1 tokens; or the first model cannot go ahead with this profile.
        ThresholdError: a threshold names no model, or is out of range.
        ValueError: replicas of no model, or fewer than one.
        RouterError: the policy `markov` refuses the matrices.
    """
    if unknown := sorted(thresholds.keys() - set(profile.names)):
        raise ThresholdError(f"thresholds: no model {unknown[0]!r}; the models are {', '.join(profile.names)}")
    spec = markov_policy(profile)
    policies = PolicyCache(PolicyContext(profile.names))
    if speculation is not None and not policies.get(spec).speculates():
        raise ProfileError(
            "speculation: takes two models, of which the first discards its token where it leaves, and the "
            "second keeps it; this profile is another"
        )
    names = named_replicas(profile, replicas or {})
    places = [(name, index) for index, model in enumerate(profile.names) for name in names[model]]
    clocks = tuple(VirtualClock() for _ in places)
    delay_ns = NEVER_NS if max_queue_delay_ns is None else max_queue_delay_ns
    subservers = tuple(
        _subserver(
            name,
            profile.names[index],
            _engine(profile, index, clock, max_inflight, limited_kv, 1.0 if index == 0 else agreement),
            _batching(thresholds.get(profile.names[index], 1), delay_ns),
        )
        for (name, index), clock in zip(places, clocks, strict=True)
    )
    orchestrator = Orchestrator(
        OrchestratorSettings(
            profile.names,
            max_inflight,
            connect_timeout_ns=NEVER_NS,
            queue=EntryQueuePolicy(),
            speculation=speculation,
            replicas=names,
        ),
        tokenizer=Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a")),
        policies=policies,
    )
    _connect(orchestrator, subservers, Hello(PROTOCOL_VERSION, PEER_NAME, "routed", profile.names, spec))
    return Deployment(orchestrator, subservers, tuple(index for _, index in places), clocks, spec)


def named_replicas(profile: Profile, replicas: Replicas) -> dict[str, tuple[str, ...]]:
    """Names of the replicas of every model.

    Raises:
        ValueError: replicas of no model, or fewer than one.
    """
    if unknown := sorted(replicas.keys() - set(profile.names)):
        raise ValueError(f"replicas: no model {unknown[0]!r}; the models are {', '.join(profile.names)}")
    return {model: replica_names(model, replicas.get(model, 1)) for model in profile.names}


def markov_policy(profile: Profile) -> PolicySpec:
    """The policy that routes as the profile says.

    Raises:
        ProfileError: a move commits neither 0 nor 1 tokens; a real step gives one token per request.
    """
    routing: dict[str, dict[str, float]] = {}
    commit: dict[str, dict[str, int]] = {}
    for source, p_row, c_row in zip(profile.names, profile.routing_matrix, profile.commit_matrix, strict=True):
        moves = [(name, p, c) for name, p, c in zip(profile.names, p_row, c_row, strict=True) if p > 0]
        for name, _, tokens in moves:
            if tokens not in (0, 1):
                raise ProfileError(f"commit.{source}.{name}: {tokens:g}; policy markov commits 0 or 1 tokens")
        routing[source] = {name: p for name, p, _ in moves}
        commit[source] = {name: int(c) for name, _, c in moves}
    return PolicySpec("markov", json.dumps({"routing": routing, "commit": commit, "entry": profile.entry}))


def _batching(threshold: int | Mapping[int, int], delay_ns: int) -> Batching:
    if isinstance(threshold, int):
        return Batching(threshold, delay_ns)
    return Batching(max_queue_delay_ns=delay_ns, by_in_flight=threshold)


def _engine(
    profile: Profile, index: int, clock: VirtualClock, max_inflight: int, limited_kv: bool, agreement: float
) -> VirtualEngine:
    model = profile.models[profile.names[index]]
    return VirtualEngine(
        model,
        clock,
        max_batch=min(max_inflight, model.max_batch or max_inflight),
        kv_tokens=model.kv_tokens if limited_kv and model.kv_tokens is not None else UNLIMITED,
        agreement=agreement,
    )


def _subserver(name: str, model: str, engine: VirtualEngine, batching: Batching) -> Subserver:
    clock = engine.clock
    return Subserver(
        name,
        SteppingRunner(engine, batching, clock_ns=clock),
        shares={"routed": engine.info.kv_blocks},
        context=PolicyContext,
        model=model,
    )


def _connect(orchestrator: Orchestrator, subservers: tuple[Subserver, ...], hello: Hello) -> None:
    for subserver in subservers:
        subserver.handle(PEER, hello, now_ns=0)
        for _, message in subserver.outbox:
            orchestrator.receive(subserver.name, message, now_ns=0)
        subserver.outbox.clear()
