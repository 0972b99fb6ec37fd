"""Every server of a deployment is replaced in turn under load, as a rollout does it, and no request is lost."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import count

import pytest

from tests.support.drawn import Drawn
from tests.support.hosts import Servers, both_elsewhere
from tests.support.supervised import supervised
from tests.support.waiting import PATIENCE_S, until
from tokenrouter.channel.tls import FOLDER_VARIABLE

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1200)]  # eight launchers start

DRAWN = Drawn(count=4, tokens=300)
HOSTS = (("small", "large"), ("small_1", "large_1"))
ENTRY = {"connect_timeout_ms": 180_000, "routed_orchestrators": 2}


class Host:
    """A launcher and what it starts, while its context lasts; `replace` ends it in order and starts another one.

    Args:
        servers: the deployment.
        models: what it loads.
        keys: its certificate.
        patience_s: how long requests that run may take when it is told to end.
    """

    def __init__(self, servers: Servers, models: tuple[str, ...], *, keys: str, patience_s: int) -> None:
        load = f"--load={','.join(models)}"
        self._command = (servers.repository, load, f"--exit-timeout={patience_s}", "--no-openai", "--no-greeting")
        self._keys = str(servers.keys / keys)
        self._stack = ExitStack()

    def __enter__(self) -> Host:
        self.launcher = self._stack.enter_context(supervised(*self._command, env={FOLDER_VARIABLE: self._keys}))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def replace(self) -> None:
        self._stack.close()
        assert self.launcher.process.returncode == 0
        self.__enter__()


class Clients:
    """Threads that send one request after another to the entries that take part, each of which has to be ready.

    Args:
        entries: all of them.
        expected: tokens by seed.
    """

    def __init__(self, entries: list[Host], expected: list[list[int]]) -> None:
        self.entries = list(entries)
        self._expected = expected
        self._answered = 0
        self._begins = threading.Lock()
        self._over = threading.Event()
        self._running: list[Future[None]] = []

    def __enter__(self) -> Clients:
        self._pool = ThreadPoolExecutor(DRAWN.count)
        self._running = [self._pool.submit(self._ask, seed) for seed in range(DRAWN.count)]
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.shutdown()
        self.answered()

    def answered(self) -> int:
        """How many requests have got the right tokens; raises for one that has not."""
        for future in self._running:
            if future.done():
                future.result()
        return self._answered

    @contextmanager
    def without(self, entry: Host) -> Iterator[None]:
        """Sends nothing to an entry; what runs there goes on."""
        with self._begins:
            self.entries.remove(entry)
        yield
        self.entries.append(entry)

    def _ask(self, seed: int) -> None:
        for turn in count(seed):
            if self._over.is_set():
                return
            with ExitStack() as stack:
                with self._begins:
                    launcher = self.entries[turn % len(self.entries)].launcher
                    assert launcher.ready(), launcher.health("/readyz")
                    tokens = stack.enter_context(DRAWN.running(launcher, only=[seed]))
                assert tokens() == [self._expected[seed]]
            with self._begins:
                self._answered += 1


@contextmanager
def answering(clients: Clients) -> Iterator[None]:
    """Requests are answered before, meanwhile and after."""
    before = clients.answered()
    yield
    after = clients.answered()
    assert after > before
    until(lambda: clients.answered() > after + DRAWN.count, what="and afterwards")


def test_no_request_is_lost_while_every_server_is_replaced() -> None:
    """Hosts of models first, then those of entries, whose clients go to the other entry before it ends."""
    with both_elsewhere("small", "large", entry=ENTRY, silence_seconds=2.0) as servers, ExitStack() as stack:
        # A model that other hosts keep busy takes all its time; what entry models run ends before.
        models = [Host(servers, loaded, keys="far", patience_s=2) for loaded in HOSTS]
        entries = [Host(servers, ("tokenrouter",), keys="near", patience_s=30) for _ in range(2)]
        for host in (*models, *entries):
            stack.enter_context(host)
        expected = DRAWN.expected(servers.repository)
        with Clients(entries, expected) as clients:
            for host, loaded in zip(models, HOSTS, strict=True):
                with answering(clients):
                    host.replace()
                    for entry in entries:
                        for name in loaded:
                            path = f"/readyz/{name}"
                            until(lambda e=entry, p=path: e.launcher.health(p)[0] == 200, within_s=3 * PATIENCE_S)
            for entry in entries:
                with answering(clients), clients.without(entry):
                    entry.replace()
