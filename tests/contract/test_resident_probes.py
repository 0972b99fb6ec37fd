"""The probes of a resident engine: each can pass, fail, or not be tried, and none takes the others with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.check_tensorrt_llm import probes
from tools.check_tensorrt_llm.probes import BY_HAND, Answer, Settings, Verdict, judged, reached, sampler_ms, tried


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


def says(verdict: str, found: str) -> str:
    return f"print('loading'); print({json.dumps({'verdict': verdict, 'found': found})!r})"


@pytest.mark.parametrize("verdict", Verdict)
def test_a_probes_last_line_is_its_answer(verdict: Verdict) -> None:
    assert tried(python(says(verdict.value, "so it is"))) == Answer(verdict, "so it is")


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import sys; sys.exit('out of memory')", "the process ended with 1: out of memory"),
        ("import os; os.kill(os.getpid(), 9)", "the process ended with -9: nothing on stderr"),
        ("print('loading')", "the process ended with 0: nothing on stderr"),
        (says("MAYBE", ""), "the process ended with 0: nothing on stderr"),
        ("print('[]')", "the process ended with 0: nothing on stderr"),
    ],
)
def test_a_probe_that_dies_or_says_nothing_has_failed(code: str, found: str) -> None:
    assert tried(python(code)) == Answer(Verdict.FAIL, found)


def test_a_probe_that_hangs_has_failed() -> None:
    assert tried(python("import time; time.sleep(60)"), timeout_s=0.5) == Answer(Verdict.FAIL, "no answer within 0.5 s")


def test_one_probe_does_not_take_the_others_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = {1: "import os; os._exit(3)", 9: says("PASS", "fast")}

    def command(number: int, settings: Settings) -> list[str]:
        return python(codes[number])

    monkeypatch.setattr(probes, "_command", command)
    rows = probes.section(Settings(Path("small"))).rows
    assert [row[1] for row in rows] == ["FAIL", "PASS", *["NOT TRIED"] * len(BY_HAND)]
    assert "ended with 3" in rows[0][2]


def engine(**changes: Any) -> Any:
    model = SimpleNamespace(forward=None, cuda_graph_runner=None)
    parts = {"model_engine": model, "resource_manager": None, "active_requests": [], **changes}
    return SimpleNamespace(_executor=SimpleNamespace(engine=SimpleNamespace(**parts)))


def test_the_executor_is_reached_with_all_its_parts_or_what_lacks_is_named() -> None:
    assert reached(engine()).verdict is Verdict.PASS
    lacks = reached(engine(model_engine=SimpleNamespace(cuda_graph_runner=None)))
    assert lacks == Answer(Verdict.FAIL, "llm._executor.engine has no model_engine.forward")
    assert reached(SimpleNamespace(_executor=object())).found == "llm._executor.engine is not there"


def test_our_sampler_is_judged_by_a_tenth_of_a_step() -> None:
    assert judged({1: 0.1, 32: 0.5}, 5.0).verdict is Verdict.PASS
    assert judged({1: 0.1, 32: 0.6}, 5.0).verdict is Verdict.FAIL
    assert judged({1: 0.1}, 0.0).verdict is Verdict.NOT_TRIED
    took = sampler_ms("cpu", 100, rows=(1, 4), repeats=2)
    assert took.keys() == {1, 4}
    assert min(took.values()) > 0
