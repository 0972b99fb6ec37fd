"""The step time of a batch size that was not measured, and who asks for it."""

from __future__ import annotations

import pytest

from tests.support.repositories import VOCAB_SIZE
from tokenrouter.engines.base import EngineRow
from tokenrouter.engines.emulated.engine import EmulatedConfig, EmulatedEngine
from tokenrouter.step_time import step_time_ms

TABLE = {5: 30.0, 1: 20.0, 3: 24.0}


@pytest.mark.parametrize(
    ("step_ms", "batch", "milliseconds"),
    [
        pytest.param(TABLE, 1, 20.0, id="measured"),
        pytest.param(TABLE, 2, 22.0, id="between"),
        pytest.param(TABLE, 4, 27.0, id="between-the-next"),
        pytest.param(TABLE, 5, 30.0, id="the-last"),
        pytest.param(TABLE, 7, 36.0, id="beyond-the-last-by-its-slope"),
        pytest.param({4: 24.0, 8: 22.0}, 1, 24.0, id="below-the-smallest"),
        pytest.param({4: 24.0, 8: 22.0}, 20, 22.0, id="a-falling-measurement-is-noise"),
        pytest.param({4: 24.0}, 20, 24.0, id="one-measurement"),
        pytest.param(6.0, 100, 6.0, id="a-number"),
    ],
)
def test_step_times_between_and_beyond_measurements(
    step_ms: float | dict[int, float], batch: int, milliseconds: float
) -> None:
    assert step_time_ms(step_ms, batch) == pytest.approx(milliseconds)


@pytest.mark.parametrize(("batch", "milliseconds"), [(2, 22.0), (7, 36.0)])
def test_the_emulated_engine_sleeps_so_long(batch: int, milliseconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    deadlines: list[float] = []
    monkeypatch.setattr("time.perf_counter", lambda: 100.0)
    config = EmulatedConfig(step_ms=TABLE, extend_ms_per_token=0.5)
    engine = EmulatedEngine(config, vocab_size=VOCAB_SIZE, sleep=deadlines.append)
    handles = [engine.open(kv_tokens=8, prompt_tokens=1) for _ in range(batch)]
    engine.step([EngineRow(handle, [1]) for handle in handles])
    engine.step([EngineRow(handle, [1, 2]) for handle in handles])
    assert deadlines == pytest.approx([100.0 + milliseconds * 1e-3, 100.0 + (milliseconds + 0.5 * batch) * 1e-3])
