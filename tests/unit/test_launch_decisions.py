"""What the launcher does about deaths, without a process."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tools.launch.decisions import (
    FRONT,
    SERVER,
    Action,
    Condition,
    Decisions,
    GiveUp,
    Limits,
    Note,
    Phase,
    Reload,
    Restart,
    StartFront,
)

MODELS = ("entry", "large", "small")
LIMITS = Limits(events=3, window_s=60.0, collect_s=0.05, load_s=20.0, hang_s=30.0)


@dataclass
class Deployment:
    """Decisions with a clock; `did` are the actions so far, without the notes."""

    decisions: Decisions
    now_s: float = 1000.0
    did: list[Action] = field(default_factory=list)

    def later(self, seconds: float) -> list[Action]:
        """What is done until then."""
        self.now_s += seconds
        actions = [action for action in self.decisions.poll(now_s=self.now_s) if not isinstance(action, Note)]
        self.did += actions
        return actions

    def died(self, *names: str) -> None:
        for name in names:
            self.decisions.died(name, now_s=self.now_s)

    def condition(self, name: str) -> Condition:
        return self.decisions.status().components[name].condition


@pytest.fixture
def serving() -> Deployment:
    deployment = Deployment(Decisions({"small", "large"}, LIMITS))
    deployment.decisions.started(MODELS, now_s=deployment.now_s)
    deployment.decisions.front_started(now_s=deployment.now_s)
    assert deployment.later(0.0) == []
    assert deployment.decisions.status().ready
    return deployment


def test_models_of_other_hosts_are_told_about_and_left_alone(serving: Deployment) -> None:
    serving.decisions.connected({"far": False}, now_s=serving.now_s)
    assert serving.condition("far") is Condition.AWAY
    assert not serving.decisions.status().ready
    assert serving.later(100.0) == []
    serving.decisions.connected({"far": True}, now_s=serving.now_s)
    assert serving.condition("far") is Condition.UP
    assert serving.decisions.status().ready
    serving.decisions.stop()
    serving.decisions.connected({"far": False}, now_s=serving.now_s)
    assert serving.condition("far") is Condition.UP


@pytest.mark.parametrize("known", ["never", "unloaded"])
def test_a_model_that_died_before_anybody_watched_it_comes_back(serving: Deployment, known: str) -> None:
    if known == "unloaded":
        serving.decisions.loaded("late", now_s=serving.now_s)
        serving.decisions.unloaded("late", now_s=serving.now_s)
    serving.decisions.lost("late", now_s=serving.now_s)
    serving.decisions.lost("late", now_s=serving.now_s)
    assert not serving.decisions.status().ready
    assert serving.later(1.0) == [Reload("late", cut=True)]
    serving.decisions.lost("late", now_s=serving.now_s)
    assert serving.later(1.0) == []
    serving.decisions.reloaded("late", now_s=serving.now_s)
    assert serving.decisions.status().ready


def among(*replicas: tuple[str, ...]) -> Deployment:
    """Serving two replicas of one model, `far_1` on another host, which is connected."""
    deployment = Deployment(Decisions({"small", "far"}, LIMITS, replicas=[("small",), *replicas]))
    deployment.decisions.started(("entry", "small", "far"), now_s=deployment.now_s)
    deployment.decisions.connected({"far_1": True}, now_s=deployment.now_s)
    return deployment


def test_it_is_ready_while_one_replica_of_each_model_is_up() -> None:
    serving = among(("far", "far_1"))
    serving.decisions.connected({"far_1": False}, now_s=serving.now_s)
    assert serving.condition("far_1") is Condition.AWAY
    assert serving.decisions.status().ready
    serving.died("far")
    assert not serving.decisions.status().ready
    serving.decisions.connected({"far_1": True}, now_s=serving.now_s)
    assert serving.decisions.status().ready
    assert serving.later(0.05) == [Reload("far", cut=False)]
    assert serving.condition("far") is Condition.RELOADING
    assert serving.decisions.status().ready
    serving.decisions.reload_failed("far", "out of memory", now_s=serving.now_s, hopeless=True)
    assert not serving.decisions.status().ready


def test_no_replica_stands_for_another_model_or_for_one_that_was_unloaded() -> None:
    serving = among(("far", "far_1"))
    serving.died("small")
    assert not serving.decisions.status().ready
    serving = among(("far", "far_1"))
    serving.decisions.unloaded("far", now_s=serving.now_s)
    assert serving.decisions.status().ready
    serving.decisions.connected({"far_1": False}, now_s=serving.now_s)
    assert not serving.decisions.status().ready


def test_an_entry_model_that_knows_one_replica_needs_that_one() -> None:
    serving = among(("far",), ("far", "far_1"))
    serving.decisions.connected({"far_1": False}, now_s=serving.now_s)
    assert serving.decisions.status().ready
    serving.decisions.connected({"far_1": True}, now_s=serving.now_s)
    serving.died("far")
    assert not serving.decisions.status().ready


def test_a_subserver_is_loaded_again_and_nobody_is_cut_off(serving: Deployment) -> None:
    serving.died("small")
    assert serving.condition("small") is Condition.DEAD
    assert not serving.decisions.status().ready
    assert serving.later(0.01) == []  # others may die with it
    assert serving.decisions.next_s() == pytest.approx(serving.now_s + 0.04)
    assert serving.later(0.04) == [Reload("small", cut=False)]
    serving.now_s += 5.0
    serving.decisions.reloaded("small", now_s=serving.now_s)
    status = serving.decisions.status()
    assert status.ready
    assert status.restarts == {"small": 1}
    assert status.recovery_s["small"] == pytest.approx(5.05)


def test_clients_of_the_entry_model_are_cut_off_before_anything_is_loaded(serving: Deployment) -> None:
    serving.died("large", "entry", "small")
    assert serving.later(0.05) == [Reload("entry", cut=True), Reload("large", cut=False), Reload("small", cut=False)]


def test_tritonserver_takes_everything_with_it_and_all_of_it_is_one_event(serving: Deployment) -> None:
    serving.died("small")
    serving.later(0.01)
    serving.died(SERVER, "large", "entry")
    assert serving.later(0.05) == [Restart("tritonserver ended")]
    serving.died("small", "large", SERVER)  # they are ended with it
    assert serving.later(1.0) == []
    assert serving.decisions.status().phase is Phase.RESTARTING
    serving.decisions.started(MODELS, now_s=serving.now_s)
    status = serving.decisions.status()
    assert status.ready
    assert status.restarts == {SERVER: 1}


def test_without_model_control_everything_starts_again(serving: Deployment) -> None:
    serving.decisions.can_reload = False
    serving.died("small")
    assert serving.later(0.05) == [Restart("small ended")]


def test_the_openai_server_comes_back_alone_also_when_it_died_during_a_restart(serving: Deployment) -> None:
    serving.died(FRONT)
    assert serving.later(0.05) == [StartFront()]
    serving.decisions.front_started(now_s=serving.now_s)
    serving.died(SERVER)
    serving.later(0.05)
    serving.died(FRONT)
    assert serving.later(1.0) == []
    serving.decisions.started(MODELS, now_s=serving.now_s)
    assert not serving.decisions.status().ready
    assert serving.later(0.0) == [StartFront()]


def test_a_load_that_fails_is_tried_again_once(serving: Deployment) -> None:
    serving.died("small")
    serving.later(0.05)
    serving.decisions.reload_failed("small", "its process was killed", now_s=serving.now_s)
    assert serving.later(0.0) == [Reload("small", cut=False)]
    serving.decisions.reload_failed("small", "out of memory", now_s=serving.now_s)
    assert serving.later(0.0) == [Restart("small cannot be loaded again: out of memory")]


def test_a_load_that_hangs_ends_in_a_restart(serving: Deployment) -> None:
    serving.died("small")
    serving.later(0.05)
    assert serving.later(19.9) == []
    assert serving.decisions.next_s() == pytest.approx(serving.now_s + 0.1)
    assert serving.later(0.2) == [Restart("small cannot be loaded again: not loaded after 20 s")]
    serving.decisions.reloaded("small", now_s=serving.now_s)  # late: of a server that is gone
    assert serving.condition("small") is Condition.STARTING


def test_clients_that_cannot_be_cut_off_mean_a_restart(serving: Deployment) -> None:
    serving.died("entry")
    serving.later(0.05)
    serving.decisions.reload_failed("entry", "not permitted", now_s=serving.now_s, hopeless=True)
    assert serving.later(0.0) == [Restart("entry cannot be loaded again: not permitted")]


def test_gives_up_after_too_many_events(serving: Deployment) -> None:
    for _ in range(LIMITS.events):
        serving.died("small")
        assert serving.later(0.05) == [Reload("small", cut=False)]
        serving.decisions.reloaded("small", now_s=serving.now_s)
    serving.died("small")
    (action,) = serving.later(0.05)
    assert action == GiveUp("4 events in 60 s, the last: small ended")
    assert serving.decisions.status().phase is Phase.GIVEN_UP
    serving.died("large")
    assert serving.later(100.0) == []


def test_events_are_forgotten(serving: Deployment) -> None:
    for _ in range(3 * LIMITS.events):
        serving.died("small")
        assert serving.later(0.05) == [Reload("small", cut=False)]
        serving.decisions.reloaded("small", now_s=serving.now_s)
        serving.later(LIMITS.window_s / LIMITS.events)


def test_a_server_that_never_starts_again_is_given_up(serving: Deployment) -> None:
    serving.died(SERVER)
    assert serving.later(0.05) == [Restart("tritonserver ended")]
    for _ in range(2):
        serving.decisions.start_failed("a port is taken", now_s=serving.now_s)
        assert serving.later(0.0) == [Restart("the start failed: a port is taken")]
    serving.decisions.start_failed("a port is taken", now_s=serving.now_s)
    assert [type(action) for action in serving.later(0.0)] == [GiveUp]


def test_a_model_that_somebody_unloaded_is_no_death(serving: Deployment) -> None:
    serving.died("small")
    serving.decisions.unloaded("small", now_s=serving.now_s)
    assert serving.later(1.0) == []
    assert serving.decisions.status().ready
    serving.decisions.loaded("small", now_s=serving.now_s)
    assert serving.condition("small") is Condition.UP
    assert serving.decisions.status().restarts == {}


def test_a_silent_server_is_started_again_but_not_one_that_was_silent_while_it_started(serving: Deployment) -> None:
    began_s = serving.now_s
    for seconds in (-40.0, -20.0, 0.0):  # told late
        serving.decisions.probed(False, now_s=began_s + seconds)
    assert serving.later(0.0) == []
    for _ in range(3):
        serving.later(10.0)
        serving.decisions.probed(False, now_s=serving.now_s)
    serving.decisions.probed(True, now_s=serving.now_s)
    for _ in range(4):
        assert serving.later(10.0) == []
        serving.decisions.probed(False, now_s=serving.now_s)
    assert serving.later(0.0) == [Restart("tritonserver has not answered for 30 s")]


class AnyOrder(RuleBasedStateMachine):
    """Whatever dies in whatever order: it comes back, or everything starts again, or the supervisor gives up."""

    def __init__(self) -> None:
        super().__init__()
        self.decisions = Decisions({"small", "large"}, Limits(events=6, window_s=60.0, load_s=20.0))
        self.now_s = 0.0
        self.pending: set[str] = set()
        self.restarting = False
        self.ended: GiveUp | None = None
        self.decisions.started(MODELS, now_s=0.0)
        self.decisions.front_started(now_s=0.0)

    @rule(seconds=st.floats(0.0, 30.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        for action in self.decisions.poll(now_s=self.now_s):
            assert self.ended is None, f"{action} after giving up"
            match action:
                case Reload(model):
                    assert model in MODELS
                    self.pending.add(model)
                case Restart():
                    self.restarting, self.pending = True, self.pending & {FRONT}
                case StartFront():
                    assert FRONT not in self.pending
                    self.pending.add(FRONT)
                case GiveUp():
                    self.ended = action

    @rule(name=st.sampled_from([SERVER, FRONT, *MODELS]))
    def dies(self, name: str) -> None:
        if name == FRONT:
            self.pending.discard(FRONT)
        self.decisions.died(name, now_s=self.now_s)

    @rule(model=st.sampled_from(MODELS))
    def is_found_dead(self, model: str) -> None:
        self.decisions.lost(model, now_s=self.now_s)

    @precondition(lambda self: self.pending)
    @rule(data=st.data(), fails=st.booleans())
    def load_ends(self, data: st.DataObject, fails: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.pending)))
        self.pending.remove(name)
        if name == FRONT:
            self.decisions.front_started(now_s=self.now_s)
        elif fails:
            self.decisions.reload_failed(name, "why", now_s=self.now_s)
        else:
            self.decisions.reloaded(name, now_s=self.now_s)
        self.time_passes(0.0)

    @precondition(lambda self: self.restarting)
    @rule(fails=st.booleans())
    def start_ends(self, fails: bool) -> None:
        self.restarting = False
        if fails:
            self.decisions.start_failed("why", now_s=self.now_s)
            self.time_passes(0.0)
        else:
            self.decisions.started(MODELS, now_s=self.now_s)

    @rule(answered=st.booleans())
    def probe(self, answered: bool) -> None:
        self.decisions.probed(answered, now_s=self.now_s)

    @invariant()
    def what_is_not_up_is_being_brought_back(self) -> None:
        status = self.decisions.status()
        if self.ended is not None:
            assert status.phase is Phase.GIVEN_UP
            return
        assert self.restarting == (status.phase is Phase.RESTARTING)
        for name, component in status.components.items():
            if component.condition is Condition.RELOADING:
                assert name in self.pending
            elif component.condition is Condition.DEAD and status.phase is Phase.SERVING:
                assert self.decisions.next_s() is not None
        everything_up = all(component.condition is Condition.UP for component in status.components.values())
        assert status.ready == (everything_up and not self.restarting)

    def teardown(self) -> None:
        """Left alone it settles: everything is up, or the supervisor has given up."""
        for _ in range(50):
            self.time_passes(0.1)
            if self.restarting:
                self.restarting = False
                self.decisions.started(MODELS, now_s=self.now_s)
            for name in sorted(self.pending):
                self.pending.remove(name)
                if name == FRONT:
                    self.decisions.front_started(now_s=self.now_s)
                else:
                    self.decisions.reloaded(name, now_s=self.now_s)
        assert self.ended is not None or self.decisions.status().ready


TestAnyOrder = AnyOrder.TestCase
