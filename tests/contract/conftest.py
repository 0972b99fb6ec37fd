"""Tests that pin behaviours of TensorRT-LLM, and the check that they notice when one of them changes.

A test marked `pins("name", ...)` runs as it is, and once more for each name with that behaviour broken in the double:
then it has to fail. So neither the double nor the test can drift away from the facts in silence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from tests.contract.double import use_double

use_double()

from tests.contract.calls import BLOCK, SMALL, build, tags  # noqa: E402
from tokenrouter.engines.base import EngineRow  # noqa: E402
from tokenrouter.engines.torch.config import KvCacheConfig, TorchEngineConfig  # noqa: E402
from tokenrouter.engines.torch.engine import TorchEngine  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "pins(*names): behaviours of TensorRT-LLM that this test notices the loss of")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    names = [name for mark in metafunc.definition.iter_markers("pins") for name in mark.args]
    if names:
        metafunc.parametrize("broken", [None, *names], indirect=True, ids=["", *(f"without {n}" for n in names)])


@pytest.fixture(autouse=True)
def broken(request: pytest.FixtureRequest) -> Iterator[str | None]:
    """The behaviour that is broken for this run of the test, or None."""
    name: str | None = getattr(request, "param", None)
    if name is None:
        yield None
        return
    from tensorrt_llm import _behaviour

    with _behaviour.broken(name):
        yield name


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    name = pyfuncitem.funcargs.get("broken")
    try:
        result = yield
    except (Exception, pytest.fail.Exception):
        if name is None:
            raise
        return True
    if name is not None:
        pytest.fail(f"{pyfuncitem.originalname} passes although {name!r} is broken in the double: it pins nothing")
    return result


@pytest.fixture(scope="session", autouse=True)
def in_process() -> Iterator[None]:
    """The double's loop in a thread of this process, which starts at once; tests of the worker process unset it."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TLLM_WORKER_USE_SINGLE_PROCESS", "1")
        yield


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with build() as llm:
        yield llm


@pytest.fixture
def salt() -> str:
    """Keeps the blocks of one test from the others."""
    return next(tags)


@pytest.fixture(scope="module")
def reference() -> Callable[[Sequence[int], int], list[int]]:
    """Greedy tokens of the torch engine."""
    cache = KvCacheConfig(tokens_per_block=BLOCK, max_tokens=1024)
    engine = TorchEngine.from_folder(SMALL, TorchEngineConfig(kv_cache_config=cache, device="cpu"))

    def greedy(prompt: Sequence[int], count: int) -> list[int]:
        handle = engine.open(kv_tokens=len(prompt) + count, prompt_tokens=len(prompt))
        new, out = list(prompt), []
        for _ in range(count):
            new = [int(engine.step([EngineRow(handle, new)]).logits[0].argmax())]
            out += new
        engine.close(handle)
        return out

    return greedy
