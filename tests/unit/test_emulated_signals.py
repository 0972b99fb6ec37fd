"""Emulated certainty: real policies fire at the given rate, alike for every server, batch and seed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from perf.emulated.signals import ROUTED_BY_FILE, router_file, signal_options, write_router
from tests.support.repositories import END_ID, VOCAB_SIZE
from tests.unit.cluster import Cluster
from tests.unit.emulated_requests import expected_tokens, request, spec, writers
from tests.unit.policy_harness import FakeRow
from tokenrouter.engines.base import EngineRow
from tokenrouter.engines.emulated.engine import EmulatedConfig, EmulatedEngine
from tokenrouter.engines.emulated.signals import SignalsConfig
from tokenrouter.errors import ConfigError
from tokenrouter.messages import PolicySpec
from tokenrouter.policies import load_policy
from tokenrouter.policies.base import PolicyContext, RouteBatch, destination_names
from tokenrouter.policies.checkpoints import save_router
from tokenrouter.policies.measures import entropy
from tokenrouter.response import Result

TOKENS, REQUESTS = 60, 16
LEAVE, RETURN = 0.35, 0.2
ENGINE = {"repeat": True, "max_seq_len": 1024, "max_batch_size": REQUESTS}


def responses(policy: PolicySpec, *, leave: float = LEAVE, back: float = 1.0, **fields: Any) -> list[Result]:
    """Responses of TOKENS tokens to REQUESTS different prompts."""
    names = ("small", "large")
    cluster = Cluster(
        engine=ENGINE,
        per_model=_converted(signal_options(leave, back)),
        kv_tokens=dict.fromkeys(names, 1024 * REQUESTS),
        max_inflight=REQUESTS,
    )
    prompts = [[7, 11, 100 + i] for i in range(REQUESTS)]
    keys = [cluster.submit(request(p, max_tokens=TOKENS, policy=policy, end_ids=(), **fields)) for p in prompts]
    cluster.run()
    cluster.assert_conserved()
    return [cluster.result(key) for key in keys]


def _converted(options: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: {"signals": SignalsConfig(**fields["signals"])} for name, fields in options.items()}


def router_policy(name: str, folder: Path, **params: Any) -> PolicySpec:
    """The policy with its router's file."""
    if name not in ROUTED_BY_FILE:
        return spec(name, **params)
    if params.get("strategy") == "entropy":  # looks at no file
        return spec(name, **params)
    path = folder / f"{name}.safetensors"
    save_router(router_file(name, vocab_size=VOCAB_SIZE), path)
    return spec(name, checkpoint=str(path), **params)


def assert_share(hits: int, trials: int, expected: float) -> None:
    """Within three standard errors of a binomial share."""
    error = math.sqrt(expected * (1 - expected) / trials)
    assert abs(hits / trials - expected) < 3 * error, f"{hits / trials:.4f} of {trials}, not {expected} +- {error:.4f}"


def shares_that_leave(policy: PolicySpec, model: str, share: float) -> tuple[int, int]:
    """How many of 20,000 positions a policy leaves `model` at, and how many it was asked about."""
    names = ("small", "large")
    config = EmulatedConfig(signals=SignalsConfig(share, names.index(model)), **{**ENGINE, "max_batch_size": 100})
    engine = EmulatedEngine(config, vocab_size=VOCAB_SIZE)
    built = load_policy(policy, PolicyContext(names))
    handles = [engine.open(kv_tokens=256, prompt_tokens=1) for _ in range(100)]
    rows = [FakeRow(model=model)] * len(handles)
    left, steps = 0, 200
    for step in range(steps):
        result = engine.step([EngineRow(handle, [i if step == 0 else 1]) for i, handle in enumerate(handles)])
        batch = RouteBatch(model, rows, result.logits.argmax(-1), result.logits, result.hidden)
        left += sum(name != model for name in destination_names(built.route(batch), batch, names))
    return left, steps * len(handles)


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("r2r", {}),
        ("r2r", {"threshold": 0.9}),
        ("r2r", {"strategy": "entropy"}),
        ("citer", {}),
        ("citer", {"threshold": 0.98}),
        ("collm", {"threshold": 0.15}),
        ("rstitch", {}),
        ("rstitch", {"threshold": 0.001}),
        ("rstitch", {"measure": "max_prob", "threshold": 0.9}),
    ],
)
def test_policies_leave_the_small_model_at_the_rate(name: str, params: dict[str, Any], tmp_path: Path) -> None:
    assert_share(*shares_that_leave(router_policy(name, tmp_path, **params), "small", LEAVE), LEAVE)


def test_rstitch_returns_from_the_large_model_at_the_rate() -> None:
    assert_share(*shares_that_leave(spec("rstitch"), "large", 1 - RETURN), RETURN)


def test_large_models_share_of_the_response_is_that_of_the_chain(tmp_path: Path) -> None:
    # R2R: each position is the large model's with the leave rate. R-Stitch: a share p / (p + q) of the steps is at the
    # large model, and each of them commits; at the small one only those that stay do.
    trials = TOKENS * REQUESTS
    results = responses(router_policy("r2r", tmp_path))
    assert_share(sum(result.tokens_by_model["large"] for result in results), trials, LEAVE)
    small, large = RETURN / (LEAVE + RETURN), LEAVE / (LEAVE + RETURN)
    expected = large / (large + small * (1 - LEAVE))
    results = responses(spec("rstitch"), back=RETURN)
    found = sum(result.tokens_by_model["large"] for result in results) / trials
    # Runs of 1/q tokens stick together: a wider band than independent trials have.
    assert abs(found - expected) < 0.08, (found, expected)


def test_glimpses_of_glimprouter_see_the_same_certainty() -> None:
    engine = EmulatedEngine(EmulatedConfig(signals=SignalsConfig(0.35)), vocab_size=VOCAB_SIZE, end_id=END_ID)
    logits = torch.cat([one_step(engine, [5, i]) for i in range(200)])
    glimpse = entropy(logits.topk(20, dim=-1).values)
    whole = entropy(logits) / math.log(VOCAB_SIZE)
    assert torch.equal(glimpse >= 0.9, whole > 0.03)
    assert ((whole < 0.001) | (whole > 0.9)).all()
    assert 0.2 < (whole > 0.9).float().mean() < 0.5


def one_step(engine: EmulatedEngine, prompt: list[int]) -> torch.Tensor:
    """[1, V] logits after a prompt."""
    handle = engine.open(kv_tokens=64, prompt_tokens=len(prompt))
    logits = engine.step([EngineRow(handle, prompt)]).logits
    engine.close(handle)
    return logits


def test_the_tokens_stay_those_of_the_script(tmp_path: Path) -> None:
    for name in ("r2r", "rstitch"):
        for i, result in enumerate(responses(router_policy(name, tmp_path))):
            assert result.tokens == [[7, 11, 100 + i][k % 3] for k in range(TOKENS)]
            assert result.totals()["emulated"] is True


def test_decisions_depend_on_the_prompt_alone() -> None:
    once = [writers(r) for r in responses(spec("rstitch"), back=RETURN, seed=1)]
    again = [writers(r) for r in responses(spec("rstitch"), back=RETURN, seed=2)]
    assert once == again
    assert len({tuple(by) for by in once}) == REQUESTS
    # In a batch of one as well.
    cluster = Cluster(engine=ENGINE, per_model=_converted(signal_options(LEAVE, RETURN)))
    key = cluster.submit(request([7, 11, 103], max_tokens=TOKENS, policy=spec("rstitch"), end_ids=()))
    cluster.run()
    assert writers(cluster.result(key)) == once[3]


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_rates_of_zero_and_one_are_certain(rate: float, tmp_path: Path) -> None:
    for result in responses(router_policy("citer", tmp_path), leave=rate):
        assert result.tokens_by_model.get("large", 0) == rate * TOKENS


def test_streams_are_independent_and_equal_ones_nest() -> None:
    def flags(share: float, stream: int) -> torch.Tensor:
        engine = EmulatedEngine(EmulatedConfig(signals=SignalsConfig(share, stream)), vocab_size=VOCAB_SIZE)
        handle = engine.open(kv_tokens=4000, prompt_tokens=1)
        hidden = [engine.step([EngineRow(handle, [9])]).hidden for _ in range(3000)]
        return torch.cat([h for h in hidden if h is not None])[:, 0] > 0

    low, high, other = flags(0.3, 0), flags(0.6, 0), flags(0.6, 1)
    assert not (low & ~high).any()
    assert_share(int((low & other).sum()), 3000, 0.18)


def test_without_signals_nothing_changes_and_an_engine_without_end_token_still_works() -> None:
    plain = EmulatedEngine(EmulatedConfig(), vocab_size=VOCAB_SIZE)
    handle = plain.open(kv_tokens=8, prompt_tokens=1)
    result = plain.step([EngineRow(handle, [9])])
    assert result.logits[0].argmax() == 9
    assert result.logits[0].max() == 10.0
    assert result.hidden is not None
    assert not result.hidden.any()
    assert plain.step([EngineRow(handle, [9])]).logits.max() <= 1.0
    assert plain.step([EngineRow(handle, [9], emit=0)]).logits.shape == (0, VOCAB_SIZE)


def test_agreement_is_how_often_the_preferred_token_is_that_of_another_model() -> None:
    def preferred(**fields: Any) -> torch.Tensor:
        engine = EmulatedEngine(EmulatedConfig(repeat=True, signals=SignalsConfig(**fields)), vocab_size=VOCAB_SIZE)
        tokens = list(range(200, 250))
        handle = engine.open(kv_tokens=3000, prompt_tokens=50)
        return engine.step([EngineRow(handle, [*tokens, *[1] * 2000], emit=2000)]).logits.argmax(-1)

    small, large = preferred(unsure=0.35), preferred(unsure=0.8, stream=1, agreement=0.7)
    assert_share(int((small == large).sum()), 2000, 0.7)
    assert (preferred(agreement=0.0) != small).all()
    assert (preferred(stream=3) == small).all()


def test_several_positions_of_a_step_are_those_of_steps_of_one() -> None:
    signals = SignalsConfig(0.5, agreement=0.5)
    one, many = (EmulatedEngine(EmulatedConfig(signals=signals), vocab_size=VOCAB_SIZE) for _ in range(2))
    a, b = (engine.open(kv_tokens=40, prompt_tokens=4) for engine in (one, many))
    tokens = [5, 6, 7, 8, 9, 10]
    one.step([EngineRow(a, tokens[:3], emit=0)])
    single = [one.step([EngineRow(a, [token])]) for token in tokens[3:]]
    whole = many.step([EngineRow(many.open(kv_tokens=9, prompt_tokens=1), [3]), EngineRow(b, tokens, emit=3)])
    assert torch.equal(whole.logits[1:], torch.cat([result.logits for result in single]))
    assert whole.hidden is not None
    assert torch.equal(whole.hidden[1:], torch.cat([r.hidden for r in single if r.hidden is not None]))


@pytest.mark.parametrize(
    "signals", [{"agreement": 1.5}, {"unsure": 1.5}, {"unsure": -0.1}, {"unsure": 0.5, "stream": -1}, {"sure": 0.5}]
)
def test_bad_signals_are_refused(signals: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"signals|unsure|agreement"):
        EmulatedEngine.from_folder(tmp_path, {"signals": signals})


def test_a_router_lands_where_a_deployment_looks_for_it(tmp_path: Path) -> None:
    for name in (*ROUTED_BY_FILE, "rstitch"):
        write_router(tmp_path, name, vocab_size=VOCAB_SIZE)
    found = sorted(path.name for path in (tmp_path / "tokenrouter" / "1" / "routers").iterdir())
    assert found == ["citer.safetensors", "collm.safetensors", "r2r.safetensors"]


def test_expected_tokens_hold_with_signals() -> None:
    cluster = Cluster(per_model=_converted(signal_options(LEAVE, RETURN)))
    key = cluster.submit(request([1, 2, 3], policy=spec("rstitch")))
    cluster.run()
    assert cluster.result(key).tokens == expected_tokens([1, 2, 3], 8)
