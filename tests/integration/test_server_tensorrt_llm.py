"""A real server whose models run on TensorRT-LLM's double, each in a worker process: same tokens as the torch engine.

Entry models share the subservers: `tokenrouter` with R2R, whose router runs inside the small model, `mix` with an
ensemble of three models, and `citer` and `collm`, each with its router inside a small model of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.contract.deployments import ROOT, TENSORRT_LLM, TORCH, add_entry, deployment
from tests.contract.double import double_environment
from tests.support.http_calls import HttpStream, answer, refusal
from tests.support.waiting import until
from tests.support.watch import WATCH
from tokenrouter.metrics_page import busy, scrape
from tokenrouter.offline import TokenRouter
from tools.demo_models.task import load_problems
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

MODELS = ("small", "large", "larger")
ROUTED_INSIDE = ("citer", "collm")
PROMPTS = [problem.prompt for problem in load_problems(ROOT / "configs/demo/problems.jsonl")[:8]]
DRAWN = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1, "seed": 7}
GLIMP = {"threshold": 0.1, "separator": "=", "think_end": "####"}
MOVES = {
    "routing": {"small": {"small": 0.6, "large": 0.4}, "large": {"small": 0.7, "large": 0.3}},
    "commit": {"large": {"small": 1}},
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "r2r inside the model": ("tokenrouter", {}),
    "rstitch": ("tokenrouter", {"policy": "rstitch", "policy_params": '{"threshold": 0.03}', **DRAWN}),
    "glimprouter": ("tokenrouter", {"policy": "glimprouter", "policy_params": json.dumps(GLIMP), **DRAWN}),
    "random": ("tokenrouter", {"policy": "random", "policy_params": '{"p": 0.35}', **DRAWN}),
    "markov": ("tokenrouter", {"policy": "markov", "policy_params": json.dumps(MOVES), **DRAWN}),
    "scripted": ("tokenrouter", {"policy": "scripted", "policy_params": '{"writers": [0, 0, 1]}', **DRAWN}),
    "query_level": ("tokenrouter", {"policy": "query_level", **DRAWN}),
    "three models": ("mix", DRAWN),
    "one model": ("small", DRAWN),
    "citer inside the model": ("citer", DRAWN),
    "collm inside the model": ("collm", DRAWN),
}


def write(folder: Path, engine: dict[str, Any]) -> Path:
    deployment(folder, "r2r", models=(*MODELS, *(f"small_{policy}" for policy in ROUTED_INSIDE)), engine=engine)
    add_entry(folder, "tokenrouter", "r2r", models=MODELS[:2])
    add_entry(folder, "mix", "me", {"weights": [0.5, 0.3, 0.2]}, models=MODELS)
    for policy in ROUTED_INSIDE:
        add_entry(folder, policy, policy, models=(f"small_{policy}", "large"))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = write(tmp_path_factory.mktemp("tensorrt_llm") / "repository", TENSORRT_LLM)
    starting = TritonServer(repository, env=double_environment(), exit_timeout_s=4, ready_timeout_s=240.0)
    with WATCH.over(starting) as running:
        yield running


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, TokenRouter]]:
    """The offline engine on the torch engine, by entry model; a single model is its first one."""
    repository = write(tmp_path_factory.mktemp("torch") / "repository", TORCH)
    with ExitStack() as stack:
        routers = {
            entry: stack.enter_context(TokenRouter.from_repository(repository, entry=entry))
            for entry in ("tokenrouter", "mix", *ROUTED_INSIDE)
        }
        yield {**routers, "small": routers["tokenrouter"]}


def assert_all_free(server: TritonServer) -> None:
    until(lambda: not busy(server.metrics_url), what="nobody holds KV")


def assert_same(server: TritonServer, router: TokenRouter, model: str, fields: dict[str, Any]) -> int:
    """The server's texts are the offline engine's; how often those requests changed the model."""
    given = {**fields, "policy": "single"} if model == "small" else fields
    wanted = router.generate(PROMPTS, max_tokens=64, **given)
    body = {"max_tokens": 64, "exclude_input_in_output": True, **fields}
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        replies = list(pool.map(lambda prompt: answer(server, model, text_input=prompt, **body), PROMPTS))
    assert [reply["text_output"] for reply in replies] == [result.text for result in wanted]
    return sum(result.handoffs for result in wanted)


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_torch_engine(
    server: TritonServer, expected: dict[str, TokenRouter], case: str
) -> None:
    model, fields = CASES[case]
    handoffs = assert_same(server, expected[model], model, fields)
    assert model == "small" or case == "query_level" or handoffs > 0
    assert_all_free(server)


def test_the_cache_kept_what_visits_left(server: TritonServer) -> None:
    page = scrape(server.metrics_url)
    for model in MODELS:
        assert page.value("tokenrouter_cached_tokens", model=model) > 0
        assert page.value("tokenrouter_lost_prefixes", model=model) == 0
        assert page.value("tokenrouter_recomputed_tokens", model=model) == 0
        assert page.value("tokenrouter_request_failures", model=model) == 0


def test_a_client_that_goes_away_frees_everything(server: TritonServer) -> None:
    alternate = json.dumps({"writers": [0, 0, 0, 1, 1]})
    body = {"max_tokens": 900, "end_id": -1, "stream": True, "policy": "scripted", "policy_params": alternate}
    streams = [HttpStream(server, {"text_input": prompt, **body}) for prompt in PROMPTS[:3]]
    for stream in streams:
        next(iter(stream))
    for stream in streams:
        stream.close()
    assert_all_free(server)
    assert answer(server, text_input=PROMPTS[0], max_tokens=8)["text_output"]


def test_what_cannot_be_served_is_refused_with_the_remedy(server: TritonServer) -> None:
    _, says = refusal(server, text_input=PROMPTS[0], max_tokens=8, temperature=0.7)
    assert "router_token: argmax" in says
    _, says = refusal(server, text_input=PROMPTS[0], max_tokens=8, return_log_probs=True)
    assert "return_log_probs" in says
    _, says = refusal(server, text_input=PROMPTS[0], max_tokens=8, policy="citer")
    assert "leave policy and policy_params out" in says
    assert_all_free(server)
