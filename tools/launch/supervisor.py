"""Does what `decisions` decides, and tells it what happens: the one loop of a launcher that serves."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from rich.console import Console

from tools.launch.decisions import FRONT, SERVER, Decisions, GiveUp, Note, Reload, Restart, StartFront
from tools.launch.follower import LogFollower
from tools.launch.health import Health
from tools.launch.remote import states
from tools.launch.watch import Death, Watch
from tools.openai_server import OpenAiServer
from tools.tritonserver.connections import cut_clients
from tools.tritonserver.installation import LaunchError
from tools.tritonserver.server import TritonServer

_TURN_S = 0.25
_RESCAN_S = 1.0
_PROBE_S = 2.0
_PROBE_TIMEOUT_S = 5.0
# A model's state is asked for before its process counts as dead; Triton answers in milliseconds or not at all.
_STATE_S = 1.0
GAVE_UP = 1


class GivingUp(Exception):
    """More died than may die; the message says what."""


@dataclass
class _Outcome:
    """What became of a `Reload`, told by its thread."""

    server_pid: int
    model: str
    old_pid: int | None
    error: str


class Supervisor:
    """Watches a running server, and brings back what dies.

    Args:
        server: is started before `run`.
        decisions: what to do.
        health: what to tell.
        stopped: set when the launcher is to end; whoever sets it calls `wake`.
        console: takes a line for everything that happens.
        remote: models of other hosts, by the entry model that is to be connected with them.
    """

    def __init__(
        self,
        server: TritonServer,
        decisions: Decisions,
        health: Health,
        stopped: threading.Event,
        console: Console,
        *,
        remote: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self._remote = remote or {}
        self._server = server
        self._decisions = decisions
        self._health = health
        self._front: OpenAiServer | None = None
        self._stopped = stopped
        self._console = console
        self._follower = LogFollower()
        self._watch = Watch()
        self._told: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._rescan_s = 0.0
        self._abandoned = False
        self._suspects: set[str] = set()
        self.wake = self._watch.wake

    def run(self, front: OpenAiServer | None) -> int:
        """Returns when the launcher is to end (0), or when it gives up (1).

        Args:
            front: the OpenAI-compatible server, running; None if there is none.
        """
        self._begin()
        self._front = front
        if front is not None:
            self._watch.add(FRONT, front.pid)
            self._decisions.front_started(now_s=time.monotonic())
        self._follower.follow(self._server.log_path, whole=False)
        prober = threading.Thread(target=self._probe, name="prober", daemon=True)
        prober.start()
        try:
            while not self._stopped.is_set():
                self._turn()
        except GivingUp as exc:
            self._say(f"giving up: {exc}")
            return GAVE_UP
        finally:
            self._publish()
        return 0

    def end(self, *, at_once: bool) -> int | None:
        """Ends the server and copies the rest of its log. Returns the server's exit code, None if it never ran.

        Args:
            at_once: do not wait for requests.
        """
        self._decisions.stop()
        self._publish()
        code = self._server.kill() if at_once else self._server.stop(hangs=self._abandoned)
        self._follower.close()
        return code

    # --- one turn -------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        now_s = time.monotonic()
        next_s = self._decisions.next_s()
        died = self._watch.wait(_TURN_S if next_s is None else min(_TURN_S, next_s - now_s))
        for death in died:
            self._died(death)
        while True:
            try:
                self._told.get_nowait()()
            except queue.Empty:
                break
        if time.monotonic() >= self._rescan_s:
            self._rescan()
        self._act()
        self._publish()
        self._follower.pump()

    def _act(self) -> None:
        for action in self._decisions.poll(now_s=time.monotonic()):
            match action:
                case Note():
                    self._say(action.text)
                case Reload():
                    self._reload(action)
                case Restart():
                    self._restart()
                case StartFront():
                    self._start_front()
                case GiveUp():
                    raise GivingUp(action.reason)

    def _publish(self) -> None:
        self._health.publish(self._decisions.status())

    def _say(self, text: str) -> None:
        """With the time of day, since deaths are looked up in other logs as well."""
        self._console.print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} supervisor: {text}", markup=False)

    # --- deaths ---------------------------------------------------------------------------------------------------

    def _died(self, death: Death) -> None:
        now_s = time.monotonic()
        if death.name in (SERVER, FRONT):
            self._say(f"{death.name} (process {death.pid}) ended")
            self._decisions.died(death.name, now_s=now_s)
            return
        other = self._server.stub_pids().get(death.name)
        if other is not None and other != death.pid:
            self._watch.add(death.name, other)
            self._decisions.loaded(death.name, now_s=now_s)
            return
        self._decisions.died(death.name, now_s=now_s)
        self._publish()  # what follows may take a while
        if self._is_unloaded(death.name):
            self._say(f"{death.name} (process {death.pid}) was unloaded")
            self._decisions.unloaded(death.name, now_s=now_s)
        else:
            self._say(f"the process of {death.name} ({death.pid}) ended")

    def _is_unloaded(self, model: str) -> bool:
        """Whether somebody unloaded it. Triton believes a model whose process died to be READY."""
        try:
            states = self._server.repository_api().states(timeout_s=_STATE_S)
        except (OSError, ValueError):
            return False
        return states.get(model) in ("UNLOADING", "UNAVAILABLE", "LOADING", "")

    def _rescan(self) -> None:
        """Models that somebody loaded."""
        self._rescan_s = time.monotonic() + _RESCAN_S
        known = self._decisions.status().components
        for model, pid in self._server.stub_pids().items():
            if self._watch.pid(model) is None and (model not in known or known[model].condition.value == "unloaded"):
                self._watch.add(model, pid)
                self._decisions.loaded(model, now_s=time.monotonic())

    def _lost_models(self) -> list[str]:
        try:
            return self._server.lost_models(timeout_s=_STATE_S)
        except (OSError, ValueError):
            return []

    def _lost(self, models: Collection[str]) -> None:
        """Once more than a probe later: before that somebody may just be unloading them."""
        for model in self._suspects.intersection(models):
            if self._watch.pid(model) is None:
                self._lose(model)
        self._suspects = set(models)

    def _lose(self, model: str) -> None:
        if self._decisions.lost(model, now_s=time.monotonic()):
            self._say(f"the process of {model} ended before it was watched")

    def _probe(self) -> None:
        """In a thread of its own: tells whether tritonserver answers, and which models died unseen."""
        while not self._stopped.wait(_PROBE_S):
            answered = self._server.is_live(timeout_s=_PROBE_TIMEOUT_S)
            self._told.put(partial(self._decisions.probed, answered, now_s=time.monotonic()))
            if not answered:
                self._watch.wake()
                continue
            self._told.put(partial(self._lost, self._lost_models()))
            if self._remote:
                found = states(self._server.metrics_url, self._remote)
                self._told.put(partial(self._decisions.connected, found, now_s=time.monotonic()))

    # --- bringing back --------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Watches a server that has become ready."""
        self._abandoned = False
        stubs = self._server.stub_pids()
        self._watch.add(SERVER, self._server.pid)
        for model, pid in stubs.items():
            self._watch.add(model, pid)
        self._decisions.started(stubs, now_s=time.monotonic())
        for model in self._lost_models():
            self._lose(model)
        if self._remote:
            self._decisions.connected(states(self._server.metrics_url, self._remote), now_s=time.monotonic())

    def _reload(self, action: Reload) -> None:
        self._abandoned = True
        old = self._server.stub_pids().get(action.model)
        if action.cut:
            try:
                number = cut_clients(self._server.pid, (self._server.ports.http, self._server.ports.grpc))
                self._say(f"{number} connections of clients cut off: what they ask {action.model} has no answer")
            except OSError as exc:
                why = f"its clients cannot be cut off ({exc.strerror or exc})"
                self._decisions.reload_failed(action.model, why, now_s=time.monotonic(), hopeless=True)
                self._act()
                return
        arguments = (self._server.pid, action.model, old, self._decisions.limits.load_s)
        # Nobody joins it: it hangs as long as Triton does.
        threading.Thread(target=self._load, args=arguments, name=f"load-{action.model}", daemon=True).start()

    def _load(self, server_pid: int, model: str, old: int | None, patience_s: float) -> None:
        """Unload first: Triton believes that the dead model is READY, and `load` alone would do nothing.

        Without waiting for the unload: requests that hang on the dead process keep the old instance UNLOADING for
        ever, while a load right after it makes a new one all the same.
        """
        api, error = self._server.repository_api(), ""
        self._server.kill_orphans()
        try:
            api.unload(model)
            api.load(model, timeout_s=patience_s)
        except (OSError, ValueError) as exc:
            error = str(exc) or type(exc).__name__
        self._told.put(partial(self._loaded, _Outcome(server_pid, model, old, error)))
        self._watch.wake()

    def _loaded(self, outcome: _Outcome) -> None:
        if outcome.server_pid != self._server.pid:  # of a server that is gone
            return
        pid, now_s = self._server.stub_pids().get(outcome.model), time.monotonic()
        error = outcome.error
        if not error and pid in (None, outcome.old_pid):
            error = "Triton says that it is loaded, but there is no new process"
        if error or pid is None:
            self._decisions.reload_failed(outcome.model, error, now_s=now_s)
        else:
            self._watch.add(outcome.model, pid)
            self._decisions.reloaded(outcome.model, now_s=now_s)

    def _restart(self) -> None:
        """At once, and never by SIGTERM: with requests that hang tritonserver does not end by itself."""
        self._publish()
        self._watch.keep(FRONT)
        self._server.kill()
        self._follower.close()
        try:
            self._server.start()
        except LaunchError as exc:
            self._decisions.start_failed(str(exc), now_s=time.monotonic())
            self._act()
            return
        self._follower.follow(self._server.log_path, whole=True)
        self._begin()

    def _start_front(self) -> None:
        assert self._front is not None
        try:
            self._front.start()
        except OSError as exc:
            self._say(f"{FRONT} cannot be started: {exc}")
            self._decisions.died(FRONT, now_s=time.monotonic())
            return
        self._watch.add(FRONT, self._front.pid)
        threading.Thread(target=self._front_waits, args=(self._front,), name="front", daemon=True).start()

    def _front_waits(self, front: OpenAiServer) -> None:
        with suppress(LaunchError):  # it ended, which the watch tells, or it is late
            front.wait()
            self._told.put(lambda: self._decisions.front_started(now_s=time.monotonic()))
            self._watch.wake()
