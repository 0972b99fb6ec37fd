"""What to do about the death of a process: events and *now* in, actions out. No clock, no process, no socket.

A deployment is tritonserver, the processes of its models, and perhaps the OpenAI-compatible server. What died is
brought back by the least that helps:

=====================  =============================================================================================
what ended             what is done
=====================  =============================================================================================
a subserver            it is unloaded and loaded; requests wait for it
another model          the same, but its clients are cut off first: Triton would never answer their requests
tritonserver           everything is ended and started again; also if a model cannot be loaded again
OpenAI server          it is started again
=====================  =============================================================================================

What dies within `Limits.collect_s` of a first death counts as one event. After more than `Limits.events` events in
`Limits.window_s` the supervisor gives up, since whoever runs it (Kubernetes, systemd) can do what it cannot. Models of
other hosts are watched, too, and not brought back: that is their own supervisor's. While a replica is away the service
is ready as long as another one of its model is up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

SERVER = "tritonserver"
FRONT = "openai"
"""Names of the processes that are no model's."""

_FEWEST_PROBES = 3


class Phase(str, Enum):
    """Of the deployment as a whole."""

    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    STOPPING = "stopping"
    GIVEN_UP = "given up"


class Condition(str, Enum):
    """Of one process."""

    UP = "up"
    STARTING = "starting"
    DEAD = "dead"
    RELOADING = "reloading"
    UNLOADED = "unloaded"
    AWAY = "away"
    """On another host, and not connected to this one's entry model."""


@dataclass(frozen=True)
class Limits:
    """When patience ends.

    Attributes:
        events: most events in `window_s`; one more and the supervisor gives up.
        window_s: see `events`.
        collect_s: deaths this close together are handled together.
        load_s: how long a model may take to load.
        hang_s: how long tritonserver may leave its liveness probe unanswered.
    """

    events: int = 5
    window_s: float = 60.0
    collect_s: float = 0.05
    load_s: float = 180.0
    hang_s: float = 30.0


@dataclass(frozen=True)
class Reload:
    """Unload this model, and load it at once; before that cut off all clients if `cut`."""

    model: str
    cut: bool


@dataclass(frozen=True)
class Restart:
    """End tritonserver and all its models with SIGKILL, and start it again."""

    reason: str


@dataclass(frozen=True)
class StartFront:
    """Start the OpenAI-compatible server again."""


@dataclass(frozen=True)
class GiveUp:
    """End everything, with exit code 1."""

    reason: str


@dataclass(frozen=True)
class Note:
    """A line for the log."""

    text: str


Action: TypeAlias = Reload | Restart | StartFront | GiveUp | Note


@dataclass(frozen=True)
class Component:
    """One process: its condition, and since when (s, on the clock of the caller)."""

    condition: Condition
    since_s: float


@dataclass(frozen=True)
class Status:
    """What health endpoints tell; never changed, replaced as a whole.

    Attributes:
        phase: of everything.
        reason: why it is not serving; empty if it is.
        components: tritonserver, models, OpenAI server by name.
        restarts: how often each was brought back, or was tried to be.
        recovery_s: how long the last recovery of each took, from the death to being up again.
        replicas: names of the replicas among which requests of an entry model may go, of each model.
    """

    phase: Phase
    reason: str
    components: dict[str, Component]
    restarts: dict[str, int]
    recovery_s: dict[str, float]
    replicas: Collection[Collection[str]] = ()

    @property
    def ready(self) -> bool:
        """Whether everything that belongs to the deployment is up, of every model one replica."""
        gone = [name for name in self.components if not self._is(name, Condition.UP, Condition.UNLOADED)]
        return self.phase is Phase.SERVING and all(map(self._is_replaced, gone))

    def _is_replaced(self, name: str) -> bool:
        """Whether other replicas serve wherever this one would."""
        among = [names for names in self.replicas if name in names]
        return bool(among) and all(any(self._is(other, Condition.UP) for other in names) for names in among)

    def _is(self, name: str, *conditions: Condition) -> bool:
        component = self.components.get(name)
        return component is not None and component.condition in conditions


@dataclass
class _Reloading:
    until_s: float
    tried: int


@dataclass
class Decisions:
    """See the module's text.

    Args:
        subservers: models that may be away while clients wait.
        limits: see `Limits`.
        can_reload: whether single models can be loaded again.
        replicas: see `Status`.
    """

    subservers: Collection[str]
    limits: Limits = field(default_factory=Limits)
    can_reload: bool = True
    replicas: Collection[Collection[str]] = ()
    _phase: Phase = Phase.STARTING
    _reason: str = "starting"
    _components: dict[str, Component] = field(default_factory=dict)
    _dead_s: dict[str, float] = field(default_factory=dict)
    _since_s: dict[str, float] = field(default_factory=dict)
    _reloading: dict[str, _Reloading] = field(default_factory=dict)
    _events_s: deque[float] = field(default_factory=deque)
    _restarts: Counter[str] = field(default_factory=Counter)
    _recovery_s: dict[str, float] = field(default_factory=dict)
    _started_s: float = 0.0
    _unanswered: list[float] = field(default_factory=list)
    _actions: list[Action] = field(default_factory=list)

    # --- what the caller asks -------------------------------------------------------------------------------------

    def status(self) -> Status:
        return Status(
            self._phase,
            self._reason,
            dict(self._components),
            dict(self._restarts),
            dict(self._recovery_s),
            self.replicas,
        )

    def poll(self, *, now_s: float) -> list[Action]:
        """What to do now, in order."""
        if self._phase is Phase.SERVING:
            self._check_server(now_s)
            self._check_reloads(now_s)
        due = self._dead_s and now_s >= min(self._dead_s.values()) + self.limits.collect_s
        if due and self._phase is Phase.SERVING:
            self._bring_back(now_s)
        actions, self._actions = self._actions, []
        return actions

    def next_s(self) -> float | None:
        """When `poll` has something to do, or None until something else happens."""
        if self._phase is not Phase.SERVING:
            return None
        times = [at_s + self.limits.collect_s for at_s in self._dead_s.values()]
        times += [reloading.until_s for reloading in self._reloading.values()]
        return min(times, default=None)

    # --- what the caller tells ------------------------------------------------------------------------------------

    def started(self, models: Iterable[str], *, now_s: float) -> None:
        """Tritonserver is ready with these models; a death before this was a failed start."""
        if self._phase is Phase.GIVEN_UP:
            return
        front = {name: each for name, each in self._components.items() if name == FRONT}
        self._dead_s = {name: at_s for name, at_s in self._dead_s.items() if name == FRONT}
        self._reloading.clear()
        self._unanswered.clear()
        self._components = front
        self._phase, self._reason, self._started_s = Phase.SERVING, "", now_s
        for name in (SERVER, *models):
            self._up(name, now_s)
        for name in [name for name in self._since_s if name not in self._components]:
            del self._since_s[name]

    def start_failed(self, why: str, *, now_s: float) -> None:
        """A restart did not lead to a ready server."""
        self._restart(f"the start failed: {why}", now_s)

    def front_started(self, *, now_s: float) -> None:
        """The OpenAI-compatible server runs."""
        self._up(FRONT, now_s)

    def died(self, name: str, *, now_s: float) -> bool:
        """A process ended that nobody had asked to end. Returns whether that matters: not during a restart."""
        if name not in self._components or name in self._dead_s:
            return False
        if name in self._reloading or (name != FRONT and self._phase is not Phase.SERVING):
            return False  # the new process died while it loaded, and its load will say so
        self._dead_s[name] = now_s
        self._since_s.setdefault(name, now_s)
        self._set(name, Condition.DEAD, now_s)
        return True

    def lost(self, model: str, *, now_s: float) -> bool:
        """A model has no process, and nobody saw it end: it died before it was watched. Returns as `died` does."""
        if self._phase is Phase.SERVING:
            self._components.setdefault(model, Component(Condition.UP, now_s))
        return self.died(model, now_s=now_s)

    def unloaded(self, model: str, *, now_s: float) -> None:
        """A model's process ended because somebody unloaded it."""
        if model in self._components:
            self._dead_s.pop(model, None)
            self._since_s.pop(model, None)
            self._set(model, Condition.UNLOADED, now_s)

    def loaded(self, model: str, *, now_s: float) -> None:
        """Somebody loaded a model, or loaded it again."""
        if self._phase is Phase.SERVING and model not in self._reloading:
            self._dead_s.pop(model, None)
            self._since_s.pop(model, None)
            self._set(model, Condition.UP, now_s)

    def reloaded(self, model: str, *, now_s: float) -> None:
        """A `Reload` has led to a new process."""
        if self._reloading.pop(model, None) is not None:
            self._up(model, now_s)

    def reload_failed(self, model: str, why: str, *, now_s: float, hopeless: bool = False) -> None:
        """A `Reload` came to nothing: tried once more, then everything starts again; at once if it is hopeless."""
        reloading = self._reloading.get(model)
        if reloading is None or self._phase is not Phase.SERVING:
            return
        if hopeless or reloading.tried > 1:
            self._restart(f"{model} cannot be loaded again: {why}", now_s)
        elif self._count(f"loading {model} again failed: {why}", now_s):
            self._reload(model, reloading.tried + 1, now_s)

    def probed(self, answered: bool, *, now_s: float) -> None:
        """Tritonserver answered its liveness probe, or did not."""
        if answered:
            self._unanswered.clear()
        elif self._phase is Phase.SERVING and now_s > self._started_s:
            self._unanswered.append(now_s)

    def connected(self, models: Mapping[str, bool], *, now_s: float) -> None:
        """Which models of other hosts are connected. Whoever runs those hosts brings them back."""
        if self._phase is Phase.SERVING:
            for model, is_connected in models.items():
                self._set(model, Condition.UP if is_connected else Condition.AWAY, now_s)

    def stop(self) -> None:
        """The deployment is to end."""
        self._phase, self._reason = Phase.STOPPING, "stopping"

    # --- what follows ---------------------------------------------------------------------------------------------

    def _check_server(self, now_s: float) -> None:
        silent = self._unanswered
        if len(silent) >= _FEWEST_PROBES and silent[-1] - silent[0] >= self.limits.hang_s:
            self._restart(f"{SERVER} has not answered for {silent[-1] - silent[0]:.0f} s", now_s)

    def _check_reloads(self, now_s: float) -> None:
        for model, reloading in list(self._reloading.items()):
            if now_s >= reloading.until_s:
                why = f"not loaded after {self.limits.load_s:g} s"
                self.reload_failed(model, why, now_s=now_s, hopeless=True)

    def _bring_back(self, now_s: float) -> None:
        dead = sorted(self._dead_s)
        if SERVER in dead:
            self._restart(f"{SERVER} ended", now_s)
            return
        models = [name for name in dead if name != FRONT]
        if models and not self.can_reload:
            self._restart(f"{_listed(models)} ended", now_s)
            return
        if not self._count(f"{_listed(dead)} ended", now_s):
            return
        self._dead_s.clear()
        if FRONT in dead:
            self._restarts[FRONT] += 1
            self._set(FRONT, Condition.STARTING, now_s)
            self._act(StartFront())
        # Clients are cut off once, before anything is loaded again.
        for model in sorted(models, key=lambda name: name in self.subservers):
            self._reload(model, 1, now_s)

    def _reload(self, model: str, tried: int, now_s: float) -> None:
        self._restarts[model] += 1
        self._reloading[model] = _Reloading(now_s + self.limits.load_s, tried)
        self._set(model, Condition.RELOADING, now_s)
        self._act(Reload(model, cut=tried == 1 and model not in self.subservers))

    def _restart(self, why: str, now_s: float) -> None:
        self._since_s.setdefault(SERVER, now_s)
        if not self._count(f"{why}; everything starts again", now_s):
            return
        self._restarts[SERVER] += 1
        self._phase, self._reason = Phase.RESTARTING, why
        self._reloading.clear()
        self._unanswered.clear()
        for name in self._components:
            if name != FRONT:
                self._dead_s.pop(name, None)
                self._since_s.setdefault(name, now_s)
                self._set(name, Condition.STARTING, now_s)
        self._act(Restart(why))

    def _count(self, what: str, now_s: float) -> bool:
        """Whether to go on after one more event."""
        if self._phase is Phase.GIVEN_UP:
            return False
        self._events_s.append(now_s)
        while now_s - self._events_s[0] > self.limits.window_s:
            self._events_s.popleft()
        number, limits = len(self._events_s), self.limits
        self._act(Note(f"{what} (event {number} in {limits.window_s:g} s, at most {limits.events})"))
        if number <= limits.events:
            return True
        self._phase, self._reason = Phase.GIVEN_UP, f"{number} events in {limits.window_s:g} s, the last: {what}"
        self._actions.append(GiveUp(self._reason))
        return False

    def _act(self, action: Action) -> None:
        """Nothing is done, or said, after giving up."""
        if self._phase is not Phase.GIVEN_UP:
            self._actions.append(action)

    def _up(self, name: str, now_s: float) -> None:
        self._set(name, Condition.UP, now_s)
        self._dead_s.pop(name, None)
        began_s = self._since_s.pop(name, None)
        if began_s is not None:
            self._recovery_s[name] = now_s - began_s
            self._act(Note(f"{name} is back after {now_s - began_s:.2f} s"))

    def _set(self, name: str, condition: Condition, now_s: float) -> None:
        component = self._components.get(name)
        if component is None or component.condition is not condition:
            self._components[name] = Component(condition, now_s)


def _listed(names: list[str]) -> str:
    return " and ".join(names)
