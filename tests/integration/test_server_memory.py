"""Memory after many short streams."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from perf.load.soak.memory import look
from tests.support.http_calls import HttpStream
from tests.support.servers import shared_memory
from tests.support.waiting import wait_idle
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

REQUESTS = 200
GROWTH_MIB = REQUESTS * 48 / 1024
"""A leak of 48 KiB per request would be found."""


def resident_mib(server: TritonServer) -> dict[str, float]:
    pids = {**server.stub_pids(), "tritonserver": server.pid}
    return {name: look(pid)["rss_mib"] for name, pid in pids.items()}


def shared_mib(server: TritonServer) -> float:
    """Space that its shared-memory files take."""
    return sum(path.stat().st_blocks * 512 for path in shared_memory(server.run_dir)) / 2**20


def one(server: TritonServer, i: int) -> None:
    """A third with stop words, a third with seed and log-probabilities, a third cancelled."""
    body = {"text_input": f"{i:04d} and some more", "max_tokens": 20, "stream": True}
    if i % 3 == 0:
        body["stop_words"] = ["more", "never"]
    elif i % 3 == 1:
        body.update(seed=i, temperature=5.0, return_log_probs=True)
    with HttpStream(server, body) as events:
        for count, event in enumerate(events):
            assert "error" not in event
            if i % 3 == 2 and count == 3:
                return


def test_memory_stays_flat(shared: TritonServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: one(shared, i), range(REQUESTS)))
        wait_idle(shared)
        before, region_before = resident_mib(shared), shared_mib(shared)
        list(pool.map(lambda i: one(shared, i), range(REQUESTS)))
    wait_idle(shared)
    after, region_after = resident_mib(shared), shared_mib(shared)
    for name, size in after.items():
        print(f"{name}: {before[name]:.1f} -> {size:.1f} MiB")
    print(f"shared memory: {region_before:.1f} -> {region_after:.1f} MiB")
    assert all(size - before[name] < GROWTH_MIB for name, size in after.items())
    assert region_after - region_before < GROWTH_MIB
