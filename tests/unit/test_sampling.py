from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.support.repositories import END_ID, emulated_spec, write_emulated
from tokenrouter import sampling
from tokenrouter.messages import Sampling
from tokenrouter.offline import TokenRouter
from tokenrouter.request import RequestFields
from tokenrouter.rng import Stream, draw
from tokenrouter.subserver.sequence import ModelSequence

WIDTH = 40


def row(prompt: Sequence[int] = (1,), response: Sequence[int] = (), **fields: Any) -> ModelSequence:
    fields.setdefault("max_tokens", 1000)
    sequence = ModelSequence(
        model="small",
        tokens=prompt,
        prompt_tokens=len(prompt),
        sampling=Sampling(**fields),
        policy=None,  # type: ignore[arg-type]
    )
    for token in response:
        sequence.commit(token)
    return sequence


def random_logits(seed: int, rows: int = 1, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)) * scale


def pick(logits: torch.Tensor, rows: list[ModelSequence]) -> list[int]:
    return sampling.sample(logits, rows).tolist()


def reference_distribution(logits: torch.Tensor, history: list[int], s: Sampling) -> np.ndarray:
    """What transformers would draw from."""
    ids = torch.tensor([history])
    scores = logits[None].clone()
    if s.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(s.repetition_penalty)(ids, scores)
    if s.temperature != 1.0:
        scores = TemperatureLogitsWarper(s.temperature)(ids, scores)
    if s.top_k:
        scores = TopKLogitsWarper(min(s.top_k, WIDTH))(ids, scores)
    if s.top_p < 1.0:
        scores = TopPLogitsWarper(s.top_p)(ids, scores)
    return scores[0].double().softmax(-1).numpy()


FILTERS = [
    pytest.param({}, id="plain"),
    pytest.param({"temperature": 0.7}, id="cold"),
    pytest.param({"temperature": 4.0}, id="hot"),
    pytest.param({"top_k": 5}, id="top-k"),
    pytest.param({"top_k": 10**9}, id="top-k-beyond-the-vocabulary"),
    pytest.param({"top_p": 0.6}, id="top-p"),
    pytest.param({"top_p": 1e-6}, id="top-p-tiny"),
    pytest.param({"top_k": 7, "top_p": 0.8, "temperature": 1.7}, id="top-k-then-top-p"),
    pytest.param({"repetition_penalty": 1.8}, id="repetition"),
    pytest.param({"repetition_penalty": 0.5, "temperature": 2.0, "top_p": 0.9}, id="reward-for-repetition"),
]


@pytest.mark.parametrize("fields", FILTERS)
def test_draws_follow_the_distribution_of_transformers_processors(fields: dict[str, Any]) -> None:
    """Chi-square over draws with many seeds; tokens that transformers filters out are never drawn."""
    logits = random_logits(4)[0]
    prompt, response = [3, 9, 9], [17, 3, 25]
    fields = {"temperature": 1.0, **fields}
    want = reference_distribution(logits, prompt + response, Sampling(1000, **fields))
    count = 4000
    rows = [row(prompt, response, seed=seed, **fields) for seed in range(count)]
    tokens = sampling.sample(logits.expand(count, -1), rows)
    observed = np.bincount(tokens.numpy(), minlength=WIDTH)
    assert observed[want == 0.0].sum() == 0
    likely = want * count >= 5
    groups = [*np.flatnonzero(likely)[:, None], np.flatnonzero(~likely & (want > 0))]
    seen = np.array([observed[group].sum() for group in groups if len(group)])
    expected = np.array([want[group].sum() * count for group in groups if len(group)])
    if len(seen) > 1:
        assert scipy.stats.chisquare(seen, expected / expected.sum() * count).pvalue > 1e-4
    else:
        assert seen[0] == count


@pytest.mark.parametrize("fields", FILTERS)
def test_each_draw_inverts_the_reference_cdf_at_its_number(fields: dict[str, Any]) -> None:
    """Exact, not statistical: the token is the one in whose interval the request's number falls."""
    fields = {"temperature": 1.0, **fields}
    prompt, response = [3, 9], [17, 3, 25]
    for seed in range(60):
        logits = random_logits(seed)[0]
        p = reference_distribution(logits, prompt + response, Sampling(1000, **fields))
        order = np.argsort(-p, kind="stable")
        u = draw(seed, len(response), Stream.SAMPLING)
        edges = p[order].cumsum()
        if np.abs(edges - u).min() < 1e-6:
            continue  # too close to an edge for float32 to decide
        assert pick(logits[None], [row(prompt, response, seed=seed, **fields)]) == [order[(edges <= u).sum()]]


def test_frequency_and_presence_penalties_count_the_response_only() -> None:
    logits = random_logits(2)
    prompt, response = [5, 5, 5], [7, 7, 7, 8, 9, 7]
    for frequency, presence in [(0.9, 0.0), (0.0, 1.5), (0.7, 0.3), (-1.0, 0.0), (0.4, -2.0)]:
        want = logits[0].clone()
        for token, count in Counter(response).items():
            want[token] = logits[0, token] - frequency * count - presence
        before = logits.clone()
        fields = {"frequency_penalty": frequency, "presence_penalty": presence}
        got = sampling._processed(logits, [row(prompt, response, **fields)])
        torch.testing.assert_close(got[0], want)
        assert torch.equal(logits, before), "the raw logits were changed"


def test_penalties_after_a_splice_count_what_the_other_model_wrote() -> None:
    sequence = row([1], [2, 2], frequency_penalty=1.0)
    assert sequence.response_counts() == Counter([2, 2])
    sequence.splice(3, [4, 4, 4])
    assert sequence.response_counts() == Counter([2, 2, 4, 4, 4])
    sequence.splice(2, [9])
    assert sequence.response_counts() == Counter([2, 9])


@pytest.mark.parametrize(
    ("words", "response", "banned"),
    [
        pytest.param(((7,),), [1, 2], {7}, id="one-token"),
        pytest.param(((7, 8),), [1, 7], {8}, id="two-tokens-begun"),
        pytest.param(((7, 8),), [7, 1], set(), id="two-tokens-interrupted"),
        pytest.param(((7, 8, 9),), [7, 8], {9}, id="three-tokens"),
        pytest.param(((7, 8, 9),), [8], set(), id="begins-before-the-response"),
        pytest.param(((4, 9),), [], set(), id="prompt-does-not-count"),
        pytest.param(((7,), (8,), (1, 5)), [1], {7, 8, 5}, id="several-words"),
    ],
)
def test_the_last_token_of_a_bad_word_is_banned_where_the_others_precede(
    words: tuple[tuple[int, ...], ...], response: list[int], banned: set[int]
) -> None:
    got = sampling._processed(random_logits(1), [row([3, 4], response, bad_words=words)])
    assert set(torch.isinf(got[0]).nonzero()[:, 0].tolist()) == banned


@pytest.mark.parametrize("position", range(5))
def test_end_ids_are_banned_before_min_tokens(position: int) -> None:
    logits = torch.zeros(1, WIDTH)
    logits[0, 30], logits[0, 31], logits[0, 5] = 9.0, 8.0, 7.0
    token = pick(logits, [row([1], [2] * position, min_tokens=3, end_ids=(30, 31))])
    assert token == ([5] if position < 3 else [30])


def test_a_row_depends_on_its_seed_and_position_and_not_on_its_neighbours() -> None:
    def rows() -> list[ModelSequence]:
        plain = [row(seed=seed, temperature=1.0) for seed in range(8)]
        odd = [
            row(seed=1, temperature=1e-6),
            row(seed=2, temperature=1.0, top_k=3, top_p=0.5),
            row(seed=3, response=[5, 6], temperature=0.8, repetition_penalty=1.3, bad_words=((7,),)),
            row(seed=4, temperature=0.0, frequency_penalty=2.0, response=[5]),
            row(seed=2**64 - 1, temperature=1e6),
        ]
        return plain + odd

    count = len(rows())
    logits = random_logits(0, count)
    alone = [pick(logits[i : i + 1], [rows()[i]])[0] for i in range(count)]
    together = pick(logits, rows())
    backwards = pick(logits.flip(0), rows()[::-1])
    assert together == alone == backwards[::-1]
    same = logits[:1].expand(64, -1)
    assert len(set(pick(same, [row(seed=seed, temperature=1.0) for seed in range(64)]))) > 5
    assert len(set(pick(same, [row([1], [2] * i, seed=1, temperature=1.0) for i in range(64)]))) > 5


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"temperature": 0.0}, id="zero"),
        pytest.param({"temperature": 1e-6}, id="tiny-temperature"),
        pytest.param({"temperature": 1e-30}, id="denormal-temperature"),
        pytest.param({"temperature": 5.0, "top_k": 1}, id="top-k-one"),
    ],
)
def test_absurdly_cold_requests_are_greedy(fields: dict[str, Any]) -> None:
    logits = random_logits(0, 20, scale=100.0)
    rows = [row(seed=seed, **fields) for seed in range(20)]
    assert pick(logits, rows) == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("fields", "poison"),
    [
        pytest.param({"bad_words": tuple((token,) for token in range(WIDTH))}, 0.0, id="everything-banned"),
        pytest.param({"frequency_penalty": -3e38}, 0.0, id="penalty-overflows-upwards"),
        pytest.param({"frequency_penalty": 3e38, "presence_penalty": 3e38}, 0.0, id="penalty-overflows-downwards"),
        pytest.param({"repetition_penalty": 1e-45}, 0.0, id="repetition-penalty-overflows"),
        pytest.param({"repetition_penalty": 1e300}, 0.0, id="repetition-penalty-beyond-float32"),
        pytest.param({}, math.nan, id="model-gives-nan"),
        pytest.param({}, math.inf, id="model-gives-infinity"),
        pytest.param({}, -math.inf, id="model-gives-minus-infinity"),
        pytest.param({"temperature": 1e6}, 0.0, id="very-hot"),
        pytest.param({"temperature": 1e300}, 0.0, id="hotter-than-float32"),
        pytest.param({"temperature": 1.1e-5}, 0.0, id="just-not-greedy"),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_absurd_request_gets_some_token_and_its_neighbours_the_right_ones(
    fields: dict[str, Any], poison: float, temperature: float
) -> None:
    logits = random_logits(7, 5)
    healthy = [row(seed=i, temperature=1.0) for i in range(5)]
    want = pick(logits, healthy)
    logits[2] += poison
    rows = [row(seed=i, temperature=1.0) for i in range(5)]
    rows[2] = row([3], [5, 5, 6], seed=2, **{"temperature": temperature, **fields})
    got = pick(logits, rows)
    assert [got[i] for i in (0, 1, 3, 4)] == [want[i] for i in (0, 1, 3, 4)]
    assert 0 <= got[2] < WIDTH


def test_banned_ids_of_a_policy_are_never_chosen() -> None:
    logits = random_logits(3)
    sequence = row(temperature=5.0)
    sequence.banned = range(5, WIDTH)
    for seed in range(100):
        sequence.seed = seed
        sequence.sampling = Sampling(10, seed=seed, temperature=5.0)
        assert pick(logits, [sequence])[0] < 5


@pytest.mark.parametrize("temperature", [0.0, 5.0])
def test_ids_beyond_a_rows_vocabulary_are_never_chosen_whatever_its_neighbours_may(temperature: float) -> None:
    logits = random_logits(6, 30)
    limits = [0, 10, WIDTH, 1000, 25, 10] * 5
    rows = [row(seed=i, temperature=temperature, vocab_size=limit) for i, limit in enumerate(limits)]
    got = pick(logits, rows)
    alone = [pick(logits[i : i + 1], [rows[i]])[0] for i in range(30)]
    assert got == alone
    assert all(token < (limit or WIDTH) for token, limit in zip(got, limits, strict=True))
    assert max(got) >= 25
    beyond = row([1], [2], end_ids=(WIDTH - 1,), min_tokens=5, bad_words=((WIDTH - 2,),), vocab_size=10)
    assert pick(logits[:1], [beyond])[0] < 10


def test_log_probabilities_are_those_of_the_raw_logits() -> None:
    logits = random_logits(5, 6)
    tokens = torch.arange(6)
    want = [math.log(math.exp(logits[i, i]) / sum(map(math.exp, logits[i].tolist()))) for i in range(6)]
    np.testing.assert_allclose(sampling.log_probs(logits, tokens).numpy(), want, rtol=1e-5)


# --- through the offline engine, with hand-offs in the middle ---------------------------------------------------------

ROUTINGS = [
    {"policy": "single"},
    {"policy": "scripted", "policy_params": '{"writers": [0, 1]}'},
    {"policy": "scripted", "policy_params": '{"writers": [1, 0, 0], "trigger": "keep"}'},
    {"policy": "random", "policy_params": '{"p": 0.5}'},
]


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("repository")
    write_emulated(folder, emulated_spec(options={"margin": 1.5}))
    with TokenRouter.from_repository(folder) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Both models prefer the prompt's only token for ever."""
    folder: Path = tmp_path_factory.mktemp("repository")
    write_emulated(folder, emulated_spec(options={"margin": 3.0, "repeat": True}))
    with TokenRouter.from_repository(folder) as loaded:
        yield loaded


CONTROLS = [
    pytest.param({"frequency_penalty": 2.0}, id="frequency-penalty"),
    pytest.param({"presence_penalty": 4.0}, id="presence-penalty"),
    pytest.param({"repetition_penalty": 9.0}, id="repetition-penalty"),
    pytest.param({"bad_words": ["AA"]}, id="bad-word-across-a-hand-off"),
    pytest.param({"bad_words": ["A"]}, id="bad-word"),
    pytest.param({"temperature": 1.0, "frequency_penalty": 0.5, "top_p": 0.9}, id="sampled"),
]


@pytest.mark.parametrize("fields", CONTROLS)
def test_controls_remember_what_the_other_model_wrote(constant: TokenRouter, fields: dict[str, Any]) -> None:
    answers = [constant.generate(["A"], max_tokens=12, seed=3, **fields, **routing)[0] for routing in ROUTINGS]
    assert all(answer.tokens == answers[0].tokens for answer in answers)
    assert len(set(answers[0].tokens)) > 1, "the control had no effect"
    assert answers[1].handoffs > 5
    for word in fields.get("bad_words", ()):
        assert word not in answers[0].text


def test_min_tokens_holds_across_hand_offs(router: TokenRouter) -> None:
    for routing in ROUTINGS:
        (short,) = router.generate(["A"], max_tokens=9, **routing)
        (long,) = router.generate(["A"], max_tokens=9, min_tokens=5, **routing)
        assert short.tokens[1:] == [END_ID]
        assert len(long.tokens) > 5
        assert END_ID not in long.tokens[:5]
        assert long.finish_reason == "stop"


def test_equal_seeds_give_equal_tokens_and_routing_under_any_load(router: TokenRouter) -> None:
    fields: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "policy": "random", "policy_params": '{"p": 0.5}'}
    prompt = "the same prompt for all of them"

    def ask(seeds: Sequence[int]) -> dict[int, tuple[list[int], list[Any]]]:
        asked = [RequestFields(text_input=prompt, seed=seed, **fields) for seed in seeds]
        answers = router.generate(asked)
        return {seed: (answer.tokens, answer.runs) for seed, answer in zip(seeds, answers, strict=True)}

    seeds = [0, 1, 2, 3, 4, 5, 6, 2**64 - 1]
    alone = {seed: ask([seed])[seed] for seed in seeds}
    together = ask(seeds)
    crowded = ask([*range(100, 108), *reversed(seeds)])
    assert together == alone
    assert {seed: crowded[seed] for seed in seeds} == alone
    assert len({tuple(tokens) for tokens, _ in alone.values()}) == len(seeds)
    assert len({str(runs) for _, runs in alone.values()}) > len(seeds) // 2


def test_requests_without_a_seed_differ_and_report_theirs(router: TokenRouter) -> None:
    answers = router.generate(["a prompt that is long enough"] * 6, max_tokens=20, temperature=1.0)
    assert len({tuple(answer.tokens) for answer in answers}) == 6
    again = router.generate(["a prompt that is long enough"], max_tokens=20, temperature=1.0, seed=answers[0].seed)
    assert again[0].tokens == answers[0].tokens


def test_log_probabilities_are_raw_whatever_the_controls_and_the_writer(router: TokenRouter) -> None:
    fields: dict[str, Any] = {"max_tokens": 10, "return_log_probs": True, "seed": 1}
    plain = router.generate(["HELLO YOU"], **fields)[0]
    for routing in ROUTINGS:
        hot = router.generate(["HELLO YOU"], temperature=0.3, top_k=1, **fields, **routing)[0]
        assert hot.tokens == plain.tokens
        assert hot.log_probs == pytest.approx(plain.log_probs, abs=1e-5)
        assert all(value < -0.1 for value in hot.log_probs)


def test_the_sampling_draw_and_the_routing_coin_are_independent() -> None:
    """Tokens drawn where the coin falls one way are distributed as where it falls the other way."""
    sampled = np.array([draw(seed, 0, Stream.SAMPLING) for seed in range(4000)])
    routed = np.array([draw(seed, 0, Stream.ROUTING) for seed in range(4000)]) < 0.5
    assert scipy.stats.ks_2samp(sampled[routed], sampled[~routed]).pvalue > 1e-3
