"""One server with emulated models that most integration tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.repositories import emulated_spec, piece_tokenizer, write_emulated
from tests.support.watch import WATCH
from tokenrouter.offline import TokenRouter
from tokenrouter.policies import BUILTIN
from tools.build_repository.spec import DeploymentSpec
from tools.tritonserver.server import TritonServer

PIECES = ("AB", "DEF", "GH")
CONTEXT = 262_144
LARGE_POOL = 200_000
ROUTED_POOL = 150_000
QUEUE_LIMIT_S = 0.5
RAISES = "tests.support.faults:RaisesAt"
BREAKS_ENGINE = "tests.support.faults:BreaksEngine"
SELECTABLE = (*BUILTIN, RAISES, BREAKS_ENGINE)
REPOSITORY_ROOT = Path(__file__).resolve().parents[2]

_LIMIT_US = int(QUEUE_LIMIT_S * 1e6)
_ENTRIES = {
    "tokenrouter": {"aliases": {"ensemble": {"shape": "ensemble"}, "tensorrt_llm_bls": {}}},
    # Run one request at a time, each under another queue policy.
    "narrow": {"max_inflight": 1, "queue": {"max_queue_size": 4, "priority_levels": 2, "default_priority_level": 2}},
    "brief": {"max_request_seconds": 1},
    "reject": {
        "max_inflight": 1,
        "queue": {"default_timeout_microseconds": _LIMIT_US, "allow_timeout_override": False},
    },
    "delay": {
        "max_inflight": 1,
        "queue": {"default_timeout_microseconds": _LIMIT_US, "timeout_action": "DELAY"},
    },
}


def shared_spec(name: str = "tokenrouter") -> DeploymentSpec:
    """The deployment with one of its entry models."""
    return emulated_spec(
        entry={"aliases": {}, "name": name, "selectable_policies": list(SELECTABLE), **_ENTRIES[name]},
        options={"step_ms": 1.0, "max_seq_len": CONTEXT},
        per_model={
            "small": {"options": {"kv_cache_config": {"max_tokens": 4 * LARGE_POOL}}, "load_after": ["large"]},
            "large": {"options": {"kv_cache_config": {"max_tokens": LARGE_POOL}}},
        },
    )


def shared_memory(run_dir: Path) -> list[Path]:
    """The shared-memory files of a server's models, by its run directory, which may be gone."""
    return list(Path("/dev/shm").glob(f"{run_dir.name}_*"))


@pytest.fixture(scope="session")
def shared_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Several entry models over one pair of emulated models, whose steps take 1 ms."""
    folder = tmp_path_factory.mktemp("shared") / "repository"
    for name in _ENTRIES:
        write_emulated(folder, shared_spec(name), piece_tokenizer(*PIECES))
    return folder


@pytest.fixture(scope="session")
def shared(shared_repository: Path) -> Iterator[TritonServer]:
    """The running server."""
    server = TritonServer(shared_repository, env={"PYTHONPATH": str(REPOSITORY_ROOT)}, exit_timeout_s=4)
    with WATCH.over(server) as running:
        yield running


@pytest.fixture(scope="session")
def offline(shared_repository: Path) -> Iterator[TokenRouter]:
    """The offline engine on the same repository."""
    with TokenRouter.from_repository(shared_repository) as router:
        yield router
