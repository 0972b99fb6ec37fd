"""The standard-serving baseline's scheduler on the emulated engine, without Triton."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import pytest

from perf.baselines.standard.paged import PagedEmulated
from perf.baselines.standard.scheduler import Arrival, Scheduler
from perf.baselines.standard.wire import Call, Reply
from perf.emulated.repository import byte_tokenizer
from tests.unit.prefix_cache_blocks import assert_conserved
from tokenrouter.messages import PolicySpec, Sampling
from tokenrouter.policies import PolicyCache
from tokenrouter.policies.base import PolicyContext

PROMPT = list(b"abcdefghij")
STAY = PolicySpec("single", '{"model": "small"}')


def scheduler(folder: Path, **options: Any) -> Scheduler:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 256, "vocab_size": 257}))
    engine = PagedEmulated.load(folder, {"repeat": True, **options})
    return Scheduler("small", engine, PolicyCache(PolicyContext(("small", "large"))))


def arrival(tokens: list[int], ticket: str = "", policy: PolicySpec = STAY, prompt_tokens: int = 10) -> Arrival:
    return Arrival(array("i", tokens).tobytes(), Call(prompt_tokens, Sampling(max_tokens=99), policy), ticket)


def step(under_test: Scheduler) -> dict[str, Reply | Exception]:
    answers = dict(under_test.step())
    under_test.tidy()
    return answers


def only(answers: dict[str, Reply | Exception]) -> Reply:
    (reply,) = answers.values()
    assert isinstance(reply, Reply), reply
    return reply


def test_calls_go_on_with_the_kv_of_the_last_one(tmp_path: Path) -> None:
    under_test = scheduler(tmp_path)
    tokens = list(PROMPT)
    for count in range(40):
        under_test.add(arrival(tokens))
        reply = only(step(under_test))
        assert reply == Reply(PROMPT[count % 10], True, "small", reply.plan, {}, 10 if count == 0 else 1)
        tokens.append(reply.token)
    assert_conserved(under_test.cache, [])


def test_one_step_serves_all_calls_that_are_ready(tmp_path: Path) -> None:
    under_test = scheduler(tmp_path, max_batch_size=3)
    for i in range(5):
        under_test.add(arrival([i, *PROMPT[1:]], str(i)))
    assert list(step(under_test)) == ["0", "1", "2"]
    assert list(step(under_test)) == ["3", "4"]
    assert not under_test.busy


def test_a_long_prompt_is_run_in_parts_and_decodes_go_first(tmp_path: Path) -> None:
    under_test = scheduler(tmp_path, max_num_tokens=4, max_batch_size=3)
    under_test.add(arrival(PROMPT, "long"))
    assert step(under_test) == {}
    under_test.add(arrival([1], "short", prompt_tokens=1))
    assert list(step(under_test)) == ["short"]
    (reply,) = step(under_test).values()
    assert isinstance(reply, Reply)
    assert (reply.token, reply.ran) == (PROMPT[0], 10)


def test_a_call_waits_until_there_is_kv(tmp_path: Path) -> None:
    under_test = scheduler(tmp_path, kv_cache_config={"tokens_per_block": 4, "max_tokens": 20})
    under_test.add(arrival(PROMPT, "first"))
    under_test.add(arrival([*PROMPT[1:], 0], "second"))
    assert list(step(under_test)) == ["first"]
    assert list(step(under_test)) == ["second"]
    assert_conserved(under_test.cache, [])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (arrival([1] * 30, "bad"), "KV for 20"),
        (arrival(PROMPT, "bad", PolicySpec("nonsense")), "nonsense"),
    ],
)
def test_a_bad_call_fails_alone(tmp_path: Path, bad: Arrival, message: str) -> None:
    under_test = scheduler(tmp_path, kv_cache_config={"tokens_per_block": 4, "max_tokens": 20})
    under_test.add(bad)
    under_test.add(arrival(PROMPT, "good"))
    answers = step(under_test)
    assert isinstance(answers["good"], Reply)
    assert message in str(answers["bad"])
    assert_conserved(under_test.cache, [])


def test_a_failing_step_answers_its_calls_and_loses_nothing(tmp_path: Path) -> None:
    under_test = scheduler(tmp_path)
    under_test.add(arrival([*PROMPT, -1], "bad", prompt_tokens=11))
    under_test._engine.step = _raise  # type: ignore[method-assign]
    assert "out of order" in str(step(under_test)["bad"])
    assert not under_test.busy
    assert_conserved(under_test.cache, [])


def _raise(rows: object) -> Any:
    raise RuntimeError("out of order")
