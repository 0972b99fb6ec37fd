from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.repositories import emulated_spec, write_emulated
from tokenrouter.errors import InvalidRequest, PolicyFailed, PromptTooLong, RouterError
from tokenrouter.offline import TokenRouter
from tokenrouter.request import RequestFields


@pytest.fixture
def router(tmp_path: Path) -> Iterator[TokenRouter]:
    write_emulated(tmp_path, emulated_spec(entry={"max_inflight": 4, "selectable_policies": ["single", "random"]}))
    with TokenRouter.from_repository(tmp_path) as loaded:
        yield loaded
        assert idle(loaded)


def idle(router: TokenRouter) -> bool:
    """Whether nothing of any request is left."""
    driver = router._driver
    return driver.orchestrator.in_flight == driver.orchestrator.queued == 0 == len(router._news) and all(
        subserver.engine.blocks_leased == 0 for subserver in driver.subservers.values()
    )


def test_responses_come_in_the_order_of_the_prompts_however_many_run_at_once(router: TokenRouter) -> None:
    prompts = [f"prompt {'x' * (i % 7)} {i}" for i in range(30)]
    seen: list[int] = []
    results = router.generate(prompts, max_tokens=50, progress=seen.append)
    assert [result.text for result in results] == prompts
    assert seen == list(range(1, 31))
    assert router.models == ("small", "large")


def test_prompts_may_be_text_ids_or_whole_requests(router: TokenRouter) -> None:
    ids = [32, 33]
    mixed: list[Any] = ["AB", ids, RequestFields(text_input="AB", stop_words=["A"])]
    assert [result.text for result in router.generate(mixed, max_tokens=9)] == ["AB", "AB", "A"]


def test_policy_parameters_may_be_a_mapping(router: TokenRouter) -> None:
    fields: dict[str, Any] = {"max_tokens": 9, "policy": "random", "seed": 1}
    text, mapping = (router.generate(["AB"], policy_params=params, **fields)[0] for params in ('{"p": 1}', {"p": 1}))
    assert (mapping.tokens, mapping.runs, mapping.handoffs) == (text.tokens, text.runs, text.handoffs)


def test_two_streams_and_a_call_between_them_do_not_mix(router: TokenRouter) -> None:
    first, second = router.stream("the first one", max_tokens=30), router.stream("THE SECOND ONE", max_tokens=30)
    texts = [next(first).text, next(second).text]
    assert router.generate(["in between"], max_tokens=30)[0].text == "in between"
    for one, other in zip(first, second, strict=False):
        texts[0] += one.text
        texts[1] += other.text
    texts[1] += "".join(update.text for update in second)
    assert texts == ["the first one", "THE SECOND ONE"]


def test_a_stream_that_is_left_early_frees_everything(router: TokenRouter) -> None:
    stream = router.stream("left early", max_tokens=30)
    next(stream)
    assert not idle(router)
    stream.close()
    assert idle(router)


@pytest.mark.parametrize(
    ("prompts", "fields", "error"),
    [
        pytest.param(["fine", ""], {}, InvalidRequest, id="one-is-refused"),
        pytest.param(["fine", "x" * 5000], {}, PromptTooLong, id="one-is-too-long"),
        pytest.param(["fine", 5], {}, TypeError, id="one-is-no-prompt"),
        pytest.param(["fine"], {"tempreature": 1.0}, TypeError, id="unknown-field"),
        pytest.param(["fine"], {"policy": "me"}, InvalidRequest, id="policy-not-offered"),
    ],
)
def test_a_call_that_fails_leaves_nothing_behind(
    router: TokenRouter, prompts: list[Any], fields: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        router.generate(prompts, max_tokens=9, **fields)
    assert idle(router)
    assert router.generate(["fine"], max_tokens=9)[0].text == "fine"


def test_a_failing_progress_callback_leaves_nothing_behind(router: TokenRouter) -> None:
    def fails(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        router.generate(["one", "two", "three"], max_tokens=9, progress=fails)
    assert idle(router)


def test_a_request_that_fails_lets_the_others_finish_first(tmp_path: Path) -> None:
    faulty = "tests.unit.faulty_policies:Faulty"
    write_emulated(tmp_path, emulated_spec(entry={"selectable_policies": [faulty]}))
    params = '{"method": "route", "position": 2}'
    done: list[int] = []
    with TokenRouter.from_repository(tmp_path) as router:
        bad = RequestFields(text_input="bad one", max_tokens=9, policy=faulty, policy_params=params)
        with pytest.raises(PolicyFailed, match="boom"):
            router.generate([bad, RequestFields(text_input="fine", max_tokens=9)], progress=done.append)
        assert done == [1, 2]
        with pytest.raises(RouterError, match="boom"):
            list(router.stream(bad))
        assert idle(router)
