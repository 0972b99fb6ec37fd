"""The double's worker process.."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tensorrt_llm import LLM
from tensorrt_llm.executor import RequestError

from tests.contract.calls import (
    PROMPT,
    STOP,
    build,
    finish,
    submit,
)
from tests.contract.processors import CALLS, Fail, Force, Record


def test_by_default_the_loop_runs_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, reference: Any, salt: str
) -> None:
    monkeypatch.delenv("TLLM_WORKER_USE_SINGLE_PROCESS")
    with build() as llm:
        output = finish(llm, salt=salt, logits_processor=[Record(salt), Force(None, None, STOP)], stop_token_ids=[STOP])
        assert output.outputs[0].token_ids == reference(PROMPT, 2)
        assert output.outputs[0].stop_reason == STOP
        assert CALLS[salt] == []
        assert finish(llm, [*PROMPT, 1], salt).cached_tokens == len(PROMPT)
        with pytest.raises(RequestError, match="no luck"):
            finish(llm, logits_processor=Fail())
        running = submit(llm, salt=salt, max_tokens=500, streaming=True)
        running.abort()
        assert running.result(timeout=30).outputs[0].finish_reason == "cancelled"
        worker = llm._executor.worker._process
        waiting = submit(llm, salt=salt, max_tokens=900)
        worker.kill()
        with pytest.raises(RequestError, match="ended"):
            waiting.result(timeout=30)
    assert worker.wait(timeout=10)


def test_a_model_that_does_not_load_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TLLM_WORKER_USE_SINGLE_PROCESS")
    with pytest.raises(RuntimeError, match=re.escape(str(tmp_path))):
        LLM(model=tmp_path, skip_tokenizer_init=True, max_seq_len=10)
