"""What engines do with `meanwhile`: it is called once, when a step needs its thread no more, or first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.torch_models import load, save_kind
from tokenrouter.engines.base import Engine, EngineRow
from tokenrouter.engines.emulated.engine import EmulatedConfig, EmulatedEngine
from tools.dtmc.profile import ModelProfile
from tools.simulate.engine import VirtualClock, VirtualEngine


def happened(engine: Engine, *watched: str) -> list[str]:
    """What happens in a step, of `meanwhile` and these methods of the engine."""
    calls: list[str] = []

    def noted(name: str, method: Any) -> Any:
        def call(*args: Any) -> Any:
            calls.append(name)
            return method(*args)

        return call

    for name in watched:
        setattr(engine, name, noted(name, getattr(engine, name)))
    engine.step([EngineRow(engine.open(kv_tokens=8, prompt_tokens=2), [1, 2])], lambda: calls.append("meanwhile"))
    return calls


def test_the_emulated_engine_sleeps_behind_it() -> None:
    engine = EmulatedEngine(EmulatedConfig(step_ms=3.0), vocab_size=9, sleep=lambda until: None)
    assert happened(engine, "_result", "_sleep") == ["_result", "meanwhile", "_sleep"]


def test_the_torch_engine_computes_behind_it(tmp_path: Path) -> None:
    assert happened(load(save_kind(tmp_path, "llama")), "_forward") == ["meanwhile", "_forward"]


def test_the_virtual_engine_calls_it_once() -> None:
    engine = VirtualEngine(ModelProfile(step_ms=3.0), VirtualClock(), max_batch=4)
    assert happened(engine) == ["meanwhile"]
