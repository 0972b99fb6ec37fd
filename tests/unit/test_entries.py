"""Several entry models over the same models: each has its part of the KV, and thresholds count the requests of all."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.repositories import END_ID
from tests.unit.emulated_requests import MS, TOKENIZER, expected_tokens, request, spec
from tokenrouter.batcher import Batching
from tokenrouter.engines.emulated.engine import EmulatedConfig, EmulatedEngine, KvConfig
from tokenrouter.entry_queue import EntryQueuePolicy
from tokenrouter.messages import Hello, PolicySpec
from tokenrouter.orchestrator.machine import Orchestrator
from tokenrouter.orchestrator.settings import OrchestratorSettings
from tokenrouter.policies import PolicyCache, PolicyContext
from tokenrouter.protocol_version import PROTOCOL_VERSION
from tokenrouter.response import Update
from tokenrouter.subserver.machine import Subserver
from tokenrouter.subserver.stepped import SteppingRunner, StepPlan

MODELS = ("small", "large")
BLOCKS = 24


class Entries:
    """Orchestrators by peer number, connected to one subserver per model without delay."""

    def __init__(self, count: int, threshold: int) -> None:
        self.now_ns = MS
        self.subservers = {name: self._subserver(name, count, threshold) for name in MODELS}
        self.orchestrators = {
            peer: Orchestrator(
                OrchestratorSettings(MODELS, 64, connect_timeout_ns=10**15, queue=EntryQueuePolicy()),
                tokenizer=TOKENIZER,
                policies=PolicyCache(PolicyContext(MODELS)),
            )
            for peer in range(1, count + 1)
        }
        self.updates: dict[tuple[int, int], Update] = {}
        for peer in self.orchestrators:
            for subserver in self.subservers.values():
                hello = Hello(PROTOCOL_VERSION, f"entry {peer}", "routed", MODELS, PolicySpec("single"))
                subserver.handle(peer, hello, now_ns=self.now_ns)
        self.exchange()

    def _subserver(self, name: str, count: int, threshold: int) -> Subserver:
        config = EmulatedConfig(kv_cache_config=KvConfig(tokens_per_block=4, max_tokens=4 * BLOCKS))
        engine = EmulatedEngine(config, vocab_size=TOKENIZER.get_vocab_size(with_added_tokens=True), end_id=END_ID)
        runner = SteppingRunner(engine, Batching(threshold, 10 * MS), clock_ns=lambda: self.now_ns)
        return Subserver(name, runner, shares={"routed": BLOCKS // count}, context=PolicyContext)

    def exchange(self) -> None:
        """Delivers everything, both ways."""
        moved = True
        while moved:
            moved = False
            for name, subserver in self.subservers.items():
                reports, subserver.outbox = subserver.outbox, []
                for peer, report in reports:
                    self.orchestrators[peer].receive(name, report, now_ns=self.now_ns)
                    moved = True
            for peer, orchestrator in self.orchestrators.items():
                messages, orchestrator.outbox = orchestrator.outbox, []
                for name, message in messages:
                    self.subservers[name].handle(peer, message, now_ns=self.now_ns)
                    moved = True
                finals = [update for update in orchestrator.take_updates() if update.final]
                self.updates.update({(peer, update.key): update for update in finals})

    def step(self) -> bool:
        """One step of every model that may start one; time passes otherwise. Whether anything runs still."""
        for subserver in self.subservers.values():
            plan = subserver.poll(now_ns=self.now_ns)
            if isinstance(plan, StepPlan):
                subserver.run_step(plan)
            self.exchange()
        self.now_ns += 10 * MS
        return any(orchestrator.keys() for orchestrator in self.orchestrators.values())


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), count=st.integers(1, 4), threshold=st.integers(1, 4))
def test_no_part_of_the_kv_is_given_twice_and_every_model_counts_all(seed: int, count: int, threshold: int) -> None:
    rng = random.Random(seed)
    entries = Entries(count, threshold)
    submitted: dict[tuple[int, int], tuple[list[int], int]] = {}
    for _ in range(rng.randint(1, 25)):
        peer = rng.randint(1, count)
        prompt = [rng.randrange(256) for _ in range(rng.randint(1, 6))]
        most = rng.randint(1, 4 * (BLOCKS // count) - len(prompt))
        policy = spec("scripted", writers=[rng.randrange(2) for _ in range(3)])
        key = entries.orchestrators[peer].submit(request(prompt, max_tokens=most, policy=policy), now_ns=entries.now_ns)
        submitted[peer, key] = (prompt, most)
        entries.exchange()
        if rng.random() < 0.5:
            entries.step()
        for name, subserver in entries.subservers.items():
            assert subserver.in_flight == sum(each.pinned(name) for each in entries.orchestrators.values())
            assert subserver.engine.blocks_leased <= BLOCKS
            for orchestrator in entries.orchestrators.values():
                assert orchestrator.reserved_blocks(name) <= BLOCKS // count
    while entries.step():
        pass
    for place, (prompt, most) in submitted.items():
        result = entries.updates[place].result
        assert result is not None
        assert result.tokens == expected_tokens(prompt, most)
    assert all(subserver.engine.blocks_leased == subserver.in_flight == 0 for subserver in entries.subservers.values())
