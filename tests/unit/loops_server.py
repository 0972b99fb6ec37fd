"""A deployment of loops in this process."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.repositories import emulated_spec, write_emulated
from tokenrouter.assembly import Entry, build_subserver
from tokenrouter.channel.unix import UnixCarrier, socket_path
from tokenrouter.loops.decoding import DecodingLoop
from tokenrouter.loops.orchestrating import OrchestratorLoop
from tokenrouter.orchestrator.machine import Orchestrator
from tokenrouter.repository import Repository
from tokenrouter.request import RequestFields
from tokenrouter.response import Update
from tokenrouter.subserver.machine import Subserver

PATIENCE_S = 30.0
PROMPT = "a prompt of some length"


class Collected:
    """A reply that keeps all updates."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self._changed = threading.Condition()

    def update(self, update: Update) -> None:
        with self._changed:
            assert not (self.updates and self.updates[-1].final), "an update after the final one"
            self.updates.append(update)
            self._changed.notify_all()

    def wait(self, condition: Callable[[Collected], bool], why: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), PATIENCE_S), f"not within {PATIENCE_S:g} s: {why}"

    def final(self) -> Update:
        self.wait(lambda reply: bool(reply.updates) and reply.updates[-1].final, "the end of the request")
        return self.updates[-1]

    def tokens(self) -> list[int]:
        result = self.final().result
        assert result is not None, self.updates[-1].error
        return result.tokens


class Server:
    """All loops of a deployment in this process, over real sockets."""

    def __init__(self, repository: Path, sockets: Path, entry: dict[str, Any] | None = None, **options: Any) -> None:
        write_emulated(repository, emulated_spec(entry=entry, options=options))
        self.repository, self.sockets = repository, sockets
        self.turned = threading.Condition()
        self.decoding: dict[str, DecodingLoop] = {}
        self.subservers: dict[str, Subserver] = {}
        self.source = Repository(repository)
        config = self.source.entry("tokenrouter")
        self.entry = Entry(config, self.source)
        self.orchestrator: Orchestrator = self.entry.orchestrator()
        dial = {name: socket_path(sockets, name) for name in config.models}
        hello = self.entry.hello("tokenrouter", "routed")
        self.broke: list[str] = []
        self.loop = OrchestratorLoop(
            self.orchestrator,
            UnixCarrier(dial=dial),
            hello=hello,
            changed=self._turned,
            broke=lambda: self._broke("entry"),
        )
        self.loop.start()

    def _turned(self) -> None:
        with self.turned:
            self.turned.notify_all()

    def _broke(self, name: str) -> None:
        self.broke.append(name)
        self._turned()

    def start(self, *names: str) -> Server:
        for name in names:
            config = self.source.model(name)
            self.decoding[name] = DecodingLoop(
                lambda config=config: build_subserver(config, self.source),  # type: ignore[misc]
                UnixCarrier(listen=socket_path(self.sockets, name)),
                changed=self._turned,
                broke=lambda name=name: self._broke(name),  # type: ignore[misc]
            )
            self.subservers[name] = self.decoding[name].start()
        return self

    def kill(self, name: str) -> None:
        self.decoding.pop(name).stop()

    def submit(self, prompt: str = PROMPT, *, timeout_ns: int | None = None, **fields: Any) -> Collected:
        reply = Collected()
        fields.setdefault("max_tokens", 64)
        request = self.entry.builder.build(RequestFields(text_input=prompt, **fields), timeout_ns=timeout_ns)
        self.loop.submit(request, reply, arrived_ns=time.monotonic_ns())
        return reply

    def wait(self, condition: Callable[[], bool], why: str) -> None:
        with self.turned:
            assert self.turned.wait_for(condition, PATIENCE_S), f"not within {PATIENCE_S:g} s: {why}"

    def idle(self) -> bool:
        """Whether no model and no ledger holds anything."""
        return self.orchestrator.in_flight == self.orchestrator.queued == 0 and all(
            subserver.engine.blocks_leased == 0 and self.orchestrator.reserved_blocks(name) == 0
            for name, subserver in self.subservers.items()
        )

    def stop(self) -> None:
        self.loop.stop()
        for loop in self.decoding.values():
            loop.stop()


@contextmanager
def running(repository: Path) -> Iterator[Callable[..., Server]]:
    """Makes servers of a repository in this folder; all of them are stopped in the end."""
    servers: list[Server] = []
    with tempfile.TemporaryDirectory(prefix="tr-", ignore_cleanup_errors=True) as folder:
        # A folder in it, because the last loop to end removes the sockets' directory.
        sockets = Path(folder) / "s"
        sockets.mkdir(mode=0o700)

        def start(**options: Any) -> Server:
            servers.append(Server(repository, sockets, **options))
            return servers[-1]

        yield start
        for server in servers:
            server.stop()
