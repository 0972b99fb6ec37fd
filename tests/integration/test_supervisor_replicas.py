"""What a launcher tells while one of two replicas is away: its own, or that of another host."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.deaths import kill_model
from tests.support.drawn import Drawn
from tests.support.hosts import Hosts, beside_and_elsewhere
from tests.support.supervised import Supervised, supervised
from tests.support.waiting import PATIENCE_S, until
from tokenrouter.channel.tls import FOLDER_VARIABLE

pytestmark = pytest.mark.integration

DRAWN = Drawn(count=4, tokens=600)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with beside_and_elsewhere({"connect_timeout_ms": 180_000}, silence_seconds=2.0) as both:
        yield both


@pytest.fixture(scope="module")
def launcher(hosts: Hosts) -> Iterator[Supervised]:
    """The entry model's host; the other one does not run yet."""
    arguments = ("--load=tokenrouter,small,large", "--restart-limit=100", "--exit-timeout=4")
    with supervised(hosts.repository, *arguments, env={FOLDER_VARIABLE: str(hosts.keys / "near")}) as running:
        yield running


def ready(launcher: Supervised, name: str = "") -> bool:
    return launcher.health(f"/readyz/{name}" if name else "/readyz")[0] == 200


def test_a_host_starts_without_the_replica_of_another_one(launcher: Supervised) -> None:
    code, told = launcher.health("/readyz")
    assert (code, told["away"], told["restarting"]) == (200, ["large_1"], [])
    assert not ready(launcher, "large_1")
    with DRAWN.running(launcher, only=[0]) as tokens:
        assert tokens()


def test_it_is_ready_until_nobody_serves_a_model(hosts: Hosts, launcher: Supervised) -> None:
    """Health is asked again and again: no answer on the way may differ."""
    far = hosts.far("large_1")
    until(lambda: ready(launcher, "large_1"), what="the other replica is connected")
    with DRAWN.running(launcher) as tokens:
        pid = launcher.pids()["large"]
        kill_model(pid, "large", launcher.metrics_url)
        _, told = until(lambda: not ready(launcher, "large") and launcher.health("/readyz"), what="large is away")
        assert told["ready"]
        assert told["restarting"] == ["large"]
        until(lambda: not ready(launcher) or ready(launcher, "large"), within_s=3 * PATIENCE_S, what="large is back")
        assert ready(launcher)
        assert launcher.pids()["large"] != pid
        assert tokens() == DRAWN.expected(hosts.repository)
    far.stop()
    until(lambda: not ready(launcher, "large_1"), what="the other host is away")
    assert launcher.health("/readyz")[1]["away"] == ["large_1"]
    assert ready(launcher)
    kill_model(launcher.pids()["large"], "large", launcher.metrics_url)
    until(lambda: not ready(launcher), what="nobody serves the model")
    until(lambda: ready(launcher), within_s=3 * PATIENCE_S, what="large is back")
