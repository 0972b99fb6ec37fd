"""The roles a model can have, as Triton's life cycle sees them."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import triton_python_backend_utils as pb_utils

from tokenrouter.assembly import Entry, build_subserver, direct_entry
from tokenrouter.channel.ends import serving
from tokenrouter.channel.unix import runtime_dir
from tokenrouter.config.roles import refuse_instances, role_of
from tokenrouter.deadline import DeadlineWatch
from tokenrouter.errors import ConfigError
from tokenrouter.loops.decoding import DecodingLoop
from tokenrouter.pulse import Pulse, Watchdog
from tokenrouter.repository import Repository
from tokenrouter.triton import process
from tokenrouter.triton.frontend import Frontend
from tokenrouter.triton.load_order import turn_to_load
from tokenrouter.triton.metrics import OrchestratorMetrics, SubserverMetrics
from tokenrouter.triton.orphan import leave_with_parent
from tokenrouter.triton.publisher import Publisher
from tokenrouter.triton.tensors import ENTRY_INPUTS, ENTRY_OUTPUTS, SUBSERVER_INPUTS, SUBSERVER_OUTPUTS
from tokenrouter.triton.text_models import WORKS, TextRole

# How long a stopping subserver lets requests finish; the launcher sets it to tritonserver's own exit time-out.
EXIT_TIMEOUT_VARIABLE = "TOKENROUTER_EXIT_TIMEOUT_S"
_EXIT_TIMEOUT_S = "30"
# How long a loop may work on one thing, steps of an engine excepted, before its process is taken for hung and ended.
HANG_TIMEOUT_VARIABLE = "TOKENROUTER_HANG_TIMEOUT_S"
_HANG_TIMEOUT_S = "30"
# A process in which no thread of Python's runs for so many of them is ended too; less would end one that was stopped.
_SILENCES = 4
# How long Triton may take to accept the last answers of a process that ends itself.
_ANSWER_S = 5.0
_PREDECESSOR_S = 20.0
# Python's own 5 ms would let a thread that builds a response or a page of metrics delay a hand-off by as much.
_SWITCH_INTERVAL_S = 1e-4


class Role(Protocol):
    """A running model."""

    def execute(self, requests: Sequence[Any]) -> None: ...

    def finalize(self) -> None:
        """Ends threads, closes sockets, frees memory."""
        ...


class OrchestratorRole:
    """The entry model; `decoupled` says whether its requests may stream, `share` whose KV they take."""

    def __init__(self, name: str, repository: Repository, *, decoupled: bool, share: str) -> None:
        entry = Entry(repository.entry(name), repository)
        orchestrator = entry.orchestrator()
        self._metrics = OrchestratorMetrics(name, orchestrator, entry.config.policy.name)
        self._publisher = Publisher(self._metrics.publish)
        self._frontend = Frontend(
            entry,
            orchestrator,
            name=name,
            share=share,
            inputs=ENTRY_INPUTS,
            outputs=frozenset(ENTRY_OUTPUTS),
            decoupled=decoupled,
            changed=self._publisher.changed,
            broke=lambda: process.abandon(f"the loop of {name} ended by an exception"),
        )
        self._publisher.changed()
        self._watched = _Watched(name, self._frontend, self._frontend.pulse)

    def execute(self, requests: Sequence[Any]) -> None:
        self._frontend.execute(requests)

    def finalize(self) -> None:
        self._watched.stop()
        self._frontend.stop()
        self._publisher.stop()
        self._metrics.release()


class SubserverRole:
    """One LLM: its decoding loop, and a front end for calls that go to it directly."""

    def __init__(self, name: str, repository: Repository, *, decoupled: bool) -> None:
        config = repository.model(name)
        entry = direct_entry(config, repository)
        self._name = name
        self._frontend: Frontend | None = None
        self._metrics = SubserverMetrics(name)
        self._publisher = Publisher(lambda: self._metrics.publish(self._subserver))
        directory = runtime_dir()
        # Those on other hosts take no memory from it.
        neighbours = [other for other in config.load_after if repository.host(other) == repository.host(name)]
        with turn_to_load(name, neighbours, directory):
            carrier = serving(
                name,
                directory,
                public=config.host,
                listen=config.listen,
                tls=config.tls,
                repository=repository.digest,
                patience_s=_predecessor_s(),
            )
            self._loop = DecodingLoop(
                lambda: build_subserver(config, repository),
                carrier,
                changed=self._publisher.changed,
                broke=self._abandon,
                name=f"decoding-{name}",
            )
            self._subserver = self._loop.start()
        logging.getLogger(__name__).info("%s: %s", name, self._subserver.engine.info)
        frontend = self._frontend = Frontend(
            entry,
            entry.orchestrator(),
            name=name,
            share="direct",
            inputs=SUBSERVER_INPUTS,
            outputs=frozenset(SUBSERVER_OUTPUTS),
            broke=lambda: process.abandon(f"the loop for direct calls of {name} ended by an exception"),
            subserver=self._subserver,
            decoupled=decoupled,
        )
        self._watched = _Watched(name, frontend, self._subserver.pulse, frontend.pulse)

    def _abandon(self) -> None:
        """The decoding loop ended by an exception: those who called this model directly are told."""
        if self._frontend is not None:
            self._frontend.stop(within_s=_ANSWER_S)
        process.abandon(f"the decoding loop of {self._name} ended by an exception")

    def execute(self, requests: Sequence[Any]) -> None:
        assert self._frontend is not None
        self._frontend.execute(requests)

    def finalize(self) -> None:
        """Requests that hold KV here may finish first: Triton unloads all models at once when it stops."""
        assert self._frontend is not None
        self._loop.drain(_seconds(EXIT_TIMEOUT_VARIABLE, _EXIT_TIMEOUT_S))
        self._watched.stop()
        self._frontend.stop()
        self._publisher.stop()
        self._loop.stop()
        self._metrics.release()


class _Watched:
    """What watches a role from outside its loops: the server's end, and loops that hang.

    Args:
        name: of the model.
        frontend: ends its responses when the server says by when.
        pulses: of its loops.

    Raises:
        ConfigError: the time-out is no number of seconds.
    """

    def __init__(self, name: str, frontend: Frontend, *pulses: Pulse) -> None:
        patience_s = _seconds(HANG_TIMEOUT_VARIABLE, _HANG_TIMEOUT_S)
        why = f"a loop of {name} has worked on one thing for {patience_s:g} s"
        self._threads: list[DeadlineWatch | Watchdog] = [DeadlineWatch(runtime_dir(), frontend.stop_at)]
        if patience_s:
            alive = partial(process.leave_unless_called_again, _SILENCES * patience_s)
            self._threads += [Watchdog(pulse, patience_s, lambda: process.abandon(why), alive) for pulse in pulses]

    def stop(self) -> None:
        for thread in self._threads:
            thread.stop()
        process.may_be_silent()


def _predecessor_s() -> float:
    """How long the old process of a model that is loaded again may take: it drains, and then frees its engine."""
    return _seconds(EXIT_TIMEOUT_VARIABLE, _EXIT_TIMEOUT_S) + _PREDECESSOR_S


def _seconds(variable: str, default: str) -> float:
    text = os.environ.get(variable, default)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(f"{variable} is {text!r}: give a number of seconds, at least 0")
    return seconds


def start_role(args: Mapping[str, str]) -> Role:
    """The role that config.pbtxt names, started.

    Args:
        args: what Triton passes to `initialize`.

    Raises:
        ConfigError: names the file and the field; Triton shows the text as the reason why the model does not load.
    """
    process.close_inherited_sockets()
    process.make_private()
    process.dump_stacks_on_request()
    leave_with_parent()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    logging.basicConfig(level=logging.INFO, handlers=[_TritonLog()], format="%(message)s", force=True)
    config = json.loads(args["model_config"])
    folder = Path(args["model_repository"])
    name = str(config["name"])
    repository = Repository(folder.parent, configs={name: config}, versions={name: args["model_version"]})
    role = _role(config, name, repository)
    process.spare_collector()
    return role


def _role(config: Mapping[str, Any], name: str, repository: Repository) -> Role:
    kind = role_of(config)
    if kind in WORKS:
        return TextRole(WORKS[kind], Entry(repository.entry(name), repository))
    refuse_instances(config)
    decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
    if kind == "subserver":
        return SubserverRole(name, repository, decoupled=decoupled)
    share = "unary" if kind == "unary" else "routed"
    return OrchestratorRole(name, repository, decoupled=decoupled, share=share)


class _TritonLog(logging.Handler):
    """Sends log records to Triton's own log."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = pb_utils.Logger
        write = logger.log_error if record.levelno >= logging.ERROR else logger.log_info
        write(self.format(record))
