"""An orchestrator and its subservers in one process, with a fake clock and a chosen order of events.

Every message passes the codec and one FIFO per direction and model, as on the token channel; the test (or a seeded
random walk) decides what happens next. The emulated engine repeats the prompt, so the right tokens are known without
the code under test.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from tests.support.repositories import END_ID
from tests.unit.emulated_requests import MS, TOKENIZER, expected_tokens
from tokenrouter.batcher import Batching, WaitUntil
from tokenrouter.engines.emulated.engine import EmulatedConfig, EmulatedEngine, KvConfig
from tokenrouter.entry_queue import EntryQueuePolicy
from tokenrouter.errors import ProtocolError, RequestCancelled, RouterError
from tokenrouter.messages import (
    Close,
    Hello,
    ModelInfo,
    PolicySpec,
    Resume,
    decode_for_orchestrator,
    decode_for_subserver,
    encode,
)
from tokenrouter.orchestrator.machine import Orchestrator
from tokenrouter.orchestrator.settings import OrchestratorSettings
from tokenrouter.policies import PolicyCache, PolicyContext
from tokenrouter.protocol_version import PROTOCOL_VERSION
from tokenrouter.replicas import replica_names
from tokenrouter.request import GenerationRequest
from tokenrouter.response import Result, Update
from tokenrouter.subserver.machine import Subserver
from tokenrouter.subserver.stepped import SteppingRunner, StepPlan

NAMES = {2: ("small", "large"), 3: ("small", "middle", "large")}


def model_info(name: str, **facts: Any) -> ModelInfo:
    """What a model says of itself."""
    known = {"version": PROTOCOL_VERSION, "model": name, "engine": "x", "emulated": True, "vocab_size": 300}
    return ModelInfo(**{**known, "max_context": 100, "block_tokens": 4, "kv_blocks": 100, **facts})


@dataclass
class Link:
    """The connection to one subserver, or its absence."""

    subserver: Subserver | None = None
    peer: int = 0
    greeted: bool = False
    down: deque[bytes] = field(default_factory=deque)
    up: deque[bytes] = field(default_factory=deque)


class Cluster:
    """See the module's text.

    Args:
        models: names, small first.
        replicas: how many of a model, 1 if it is left out.
        batching: thresholds by model; eager by default.
        engine: `EmulatedConfig` fields of every model.
        per_model: further `EmulatedConfig` fields by model.
        wrap: replaces a model's engine, for faulty ones.
        connect: whether all models are connected from the start.
        settings: `OrchestratorSettings` fields.
    """

    def __init__(
        self,
        models: tuple[str, ...] = ("small", "large"),
        *,
        replicas: Mapping[str, int] | None = None,
        batching: Mapping[str, Batching] | None = None,
        engine: Mapping[str, Any] | None = None,
        per_model: Mapping[str, Mapping[str, Any]] | None = None,
        kv_tokens: Mapping[str, int] | None = None,
        wrap: Callable[[str, EmulatedEngine], Any] = lambda name, engine: engine,
        connect: bool = True,
        tokenizer: Tokenizer = TOKENIZER,
        **settings: Any,
    ) -> None:
        self.models = models
        self.replicas = {model: replica_names(model, (replicas or {}).get(model, 1)) for model in models}
        self.model_of = {name: model for model, names in self.replicas.items() for name in names}
        self.now_ns = 1_000 * MS
        self.batching = dict(batching or {})
        self.engine_fields = dict(engine or {})
        self.per_model = {name: dict(fields) for name, fields in (per_model or {}).items()}
        self.kv_tokens = dict(kv_tokens or {})
        self.wrap = wrap
        self.tokenizer = tokenizer
        settings = {
            "max_inflight": 64,
            "connect_timeout_ns": 30_000 * MS,
            "queue": EntryQueuePolicy(),
            **settings,
        }
        self.orchestrator = Orchestrator(
            OrchestratorSettings(models=models, replicas=self.replicas, **settings),
            tokenizer=tokenizer,
            policies=PolicyCache(PolicyContext(models)),
        )
        self.links = {name: Link() for name in self.model_of}
        self.updates: dict[int, list[Update]] = {}
        self._peers = 0
        if connect:
            for name in self.model_of:
                self.connect(name)
            self.deliver_all()

    # --- single events ----------------------------------------------------------------------------------------------

    def connect(self, name: str) -> Subserver:
        """A fresh subserver starts and is greeted."""
        link, model = self.links[name], self.model_of[name]
        assert link.subserver is None
        kv = KvConfig(tokens_per_block=4, max_tokens=self.kv_tokens.get(name, self.kv_tokens.get(model, 4096)))
        fields = {"kv_cache_config": kv, **self.engine_fields, **self.per_model.get(model, {})}
        vocab_size = self.tokenizer.get_vocab_size(with_added_tokens=True)
        engine = self.wrap(name, EmulatedEngine(EmulatedConfig(**fields), vocab_size=vocab_size, end_id=END_ID))
        self._peers += 1
        link.peer, link.greeted = self._peers, False
        link.subserver = Subserver(
            name,
            SteppingRunner(engine, self.batching.get(model, Batching()), clock_ns=lambda: self.now_ns),
            shares={"routed": engine.info.kv_blocks},
            context=PolicyContext,
            model=model,
        )
        hello = Hello(PROTOCOL_VERSION, "test", "routed", self.models, PolicySpec("single"))
        link.down.append(encode(hello))
        return link.subserver

    def kill(self, name: str) -> None:
        """The subserver is gone, and with it what is on the wire."""
        link, self.links[name] = self.links[name], Link()
        if link.greeted:
            self.orchestrator.disconnected(name, now_ns=self.now_ns)
        self.collect()

    def evict(self, name: str, key: int) -> None:
        """A model forgets a request that is elsewhere."""
        subserver, peer = self.subserver(name), self.links[name].peer
        held = subserver._peers[peer].sequences.get(key) if peer in subserver._peers else None
        if held is not None and not held.resident:
            subserver.handle(peer, Close(key, subserver.in_flight), now_ns=self.now_ns)

    def submit(self, what: GenerationRequest) -> int:
        """A client's request arrives now."""
        key = self.orchestrator.submit(what, now_ns=self.now_ns)
        self.updates.setdefault(key, [])
        self.collect()
        return key

    def cancel(self, key: int) -> None:
        """A client goes away."""
        self.orchestrator.cancel(key, now_ns=self.now_ns)
        self.collect()

    def undeliverable(self, key: int) -> None:
        """A message about a request turns out to be nothing that can travel."""
        self.orchestrator.undeliverable(Resume(key, 0, 0, 0, []), ProtocolError("test"))
        self.collect()

    def tick(self, *, at_ns: int | None = None) -> None:
        """Time passes, at most to the orchestrator's next deadline if no time is given."""
        self.now_ns = self.now_ns if at_ns is None else at_ns
        self.orchestrator.tick(now_ns=self.now_ns)
        self.collect()

    def stop_at(self, at_ns: int) -> None:
        """The server is going to stop."""
        self.orchestrator.stop_at(at_ns, now_ns=self.now_ns)
        self.collect()

    def deliver_down(self, name: str) -> bool:
        """One message reaches a subserver."""
        link = self.links[name]
        if link.subserver is None or not link.down:
            return False
        message = decode_for_subserver(link.down.popleft())
        link.subserver.handle(link.peer, message, now_ns=self.now_ns)
        self.collect()
        return True

    def deliver_up(self, name: str) -> bool:
        """One message reaches the orchestrator."""
        link = self.links[name]
        if not link.up:
            return False
        link.greeted = True
        message = decode_for_orchestrator(link.up.popleft())
        self.orchestrator.receive(name, message, now_ns=self.now_ns)
        self.collect()
        return True

    def plan(self, name: str) -> StepPlan | None:
        """The step that a model would start now."""
        subserver = self.links[name].subserver
        plan = None if subserver is None else subserver.poll(now_ns=self.now_ns)
        return plan if isinstance(plan, StepPlan) else None

    def step(self, name: str, *, took_ns: int = 0) -> bool:
        """A model runs one step, if it has one to run."""
        plan = self.plan(name)
        if plan is None:
            return False
        self.now_ns += took_ns
        self.subserver(name).run_step(plan)
        self.collect()
        return True

    # --- many events ------------------------------------------------------------------------------------------------

    def subserver(self, name: str) -> Subserver:
        """The subserver that runs now."""
        found = self.links[name].subserver
        assert found is not None
        return found

    def deliver_all(self) -> None:
        """Everything on the wire arrives."""
        while self._everybody(lambda name: self.deliver_down(name) or self.deliver_up(name)):
            pass

    def _everybody(self, act: Callable[[str], bool]) -> bool:
        """Every model acts; whether one of them had something to do."""
        acted = [act(name) for name in self.model_of]
        return any(acted)

    def run(self, *, limit: int = 20_000) -> None:
        """Runs to the end in a fixed order: messages, then one step of each model, then the next deadline."""
        for _ in range(limit):
            self.deliver_all()
            if not self._everybody(self.step) and not self.jump():
                return
        raise AssertionError(f"not idle after {limit} rounds; {self.orchestrator.in_flight} requests still run")

    def walk(self, rng: random.Random, *, limit: int = 50_000) -> None:
        """Runs to the end in a random order that keeps every channel FIFO."""
        for _ in range(limit):
            if not self.random_event(rng):
                return
        raise AssertionError(f"not idle after {limit} events; {self.orchestrator.in_flight} requests still run")

    def assert_all_end_right(
        self,
        rng: random.Random,
        submitted: Mapping[int, tuple[Sequence[int], int]],
        *,
        cancelled: Collection[int],
        dead: Collection[str],
    ) -> None:
        """Brings back who is dead and runs to the end: each request has its tokens, or was cancelled.

        Args:
            submitted: prompt and `max_tokens` by key.
        """
        for name in dead:
            self.connect(name)
        self.walk(rng)
        self.deliver_all()
        self.assert_conserved()
        for key, (prompt, max_tokens) in submitted.items():
            error = self.updates[key][-1].error
            if error is not None:
                assert isinstance(error, RequestCancelled)
                assert key in cancelled
            else:
                assert self.result(key).tokens == expected_tokens(prompt, max_tokens)

    def random_event(self, rng: random.Random) -> bool:
        """One of the events that are possible now; time jumps to the next deadline only if there is no other."""
        events: list[Callable[[], Any]] = []
        for name in self.model_of:
            if self.links[name].subserver is not None and self.links[name].down:
                events.append(lambda name=name: self.deliver_down(name))
            if self.links[name].up:
                events.append(lambda name=name: self.deliver_up(name))
            if self.plan(name) is not None:
                events.append(lambda name=name: self.step(name, took_ns=rng.randrange(5 * MS)))
        if not events:
            return self.jump()
        rng.choice(events)()
        return True

    def jump(self) -> bool:
        """Time jumps to the next deadline of a batcher or of the orchestrator, if one lies within an hour."""
        times = []
        for link in self.links.values():
            look = None if link.subserver is None else link.subserver.poll(now_ns=self.now_ns)
            times += [look.at_ns] if isinstance(look, WaitUntil) else []
        deadline_ns = self.orchestrator.next_deadline_ns()
        if deadline_ns is not None and self.keys():
            times.append(deadline_ns)
        if not times or min(times) > self.now_ns + 3_600_000 * MS:
            return False
        self.tick(at_ns=max(self.now_ns, min(times)))
        return True

    def collect(self) -> None:
        """Moves what the state machines have to say onto the wires and to the clients."""
        for name, message in self.orchestrator.outbox:
            self.links[name].down.append(encode(message))
        self.orchestrator.outbox.clear()
        for update in self.orchestrator.take_updates():
            self.updates.setdefault(update.key, []).append(update)
        for name in self.model_of:
            link = self.links[name]
            if link.subserver is not None:
                link.up.extend(encode(report) for peer, report in link.subserver.outbox if peer == link.peer)
                link.subserver.outbox.clear()

    # --- what clients saw -------------------------------------------------------------------------------------------

    def keys(self) -> list[int]:
        """Requests that are not over."""
        return list(self.orchestrator.keys())

    def result(self, key: int) -> Result:
        """The response of a request that ended well."""
        last = self.updates[key][-1]
        assert last.error is None, f"request {key} failed: {last.error}"
        assert last.result is not None, f"request {key} is not over"
        return last.result

    def error(self, key: int) -> RouterError:
        """The error of a request that failed."""
        error = self.updates[key][-1].error
        assert error is not None, f"request {key} did not fail: {self.updates[key]}"
        return error

    def assert_conserved(self) -> None:
        """Every request ended exactly once and nothing of it is left anywhere."""
        assert not self.keys(), f"requests {self.keys()} never ended"
        for key, updates in self.updates.items():
            finals = [update for update in updates if update.final]
            assert len(finals) == 1, f"request {key} had {len(finals)} final updates"
            assert updates[-1].final, f"request {key} had updates after the final one"
        for name in self.model_of:
            reserved = self.orchestrator.reserved_blocks(name)
            assert reserved == 0, f"{reserved} blocks of {name} are still reserved in the ledger"
            subserver = self.links[name].subserver
            if subserver is not None:
                leased = subserver.engine.blocks_leased
                assert leased == 0, f"{name} still leases {leased} blocks"
                assert subserver.open_sequences == subserver.residents == 0, f"{name} still holds sequences"
                assert subserver.in_flight == 0, f"{name} believes that {subserver.in_flight} are in flight"
