"""Which tokens and which text come out, with hand-offs in the middle, streamed and not, alone and under load."""

from __future__ import annotations

import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.grpc_calls import GrpcStream, Message, grpc_stream
from tests.support.http_calls import answer, stream
from tests.support.waiting import wait_idle
from tokenrouter.offline import TokenRouter
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

MULTIBYTE = "a🙂é漢字"
ALTERNATE = {"policy": "scripted", "policy_params": json.dumps({"writers": ["small", "large"]})}
KEEP = {"policy": "scripted", "policy_params": json.dumps({"writers": ["small", "large"], "trigger": "keep"})}
PAIRS = {"policy": "scripted", "policy_params": json.dumps({"writers": ["small", "small", "large", "large"]})}
ONLY_SMALL = {"policy": "single", "policy_params": json.dumps({"model": "small"})}
ONLY_LARGE = {"policy": "single", "policy_params": json.dumps({"model": "large"})}
ROUTINGS = {"alternate": ALTERNATE, "keep": KEEP, "pairs": PAIRS, "small": ONLY_SMALL, "large": ONLY_LARGE}
# The noise decides: the preferred token's lead of 10 shrinks to 2 over noise within 0.2.
HOT = {"temperature": 5.0}


def texts(messages: list[Message]) -> str:
    assert not any(message.error for message in messages), messages
    return "".join(message.text for message in messages)


def tokens(messages: list[Message]) -> list[int]:
    assert not any(message.error for message in messages), messages
    return [token for message in messages for token in message.ids]


def both_ways(server: TritonServer, bodies: list[dict[str, Any]]) -> list[tuple[list[Message], list[Message]]]:
    """Every body streamed and not streamed, all at once."""
    with GrpcStream(server) as call:
        for i, body in enumerate(bodies):
            call.send({**body, "stream": True}, request_id=f"stream-{i}")
            call.send({**body, "exclude_input_in_output": True}, request_id=f"whole-{i}")
        return [(call.wait(f"stream-{i}"), call.wait(f"whole-{i}")) for i in range(len(bodies))]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_characters_of_several_bytes_cut_everywhere(shared: TritonServer, routing: str) -> None:
    raw = MULTIBYTE.encode()
    bodies = [{"text_input": MULTIBYTE, "max_tokens": limit, **ROUTINGS[routing]} for limit in range(1, len(raw) + 2)]
    for limit, (streamed, whole) in enumerate(both_ways(shared, bodies), start=1):
        complete = raw[:limit].decode("utf-8", "ignore")
        text = texts(whole)
        assert texts(streamed) == text
        assert text.rstrip("\ufffd") == complete
        assert ("\ufffd" in text) == (complete.encode() != raw[:limit])
        deltas = [message.text for message in streamed if message.tensors]
        assert not any("\ufffd" in delta for delta in deltas[:-1])


STOPS: dict[str, tuple[list[str], str]] = {
    "inside a token, from its start": (["DE"], "ABCDE"),
    "over two tokens": (["CD"], "ABCD"),
    "end of a token": (["F"], "ABCDEF"),
    "over three tokens": (["BCDEFG"], "ABCDEFG"),
    "later in the list ends earlier": (["FG", "BC"], "ABC"),
    "one inside the other": (["CDEF", "D"], "ABCD"),
    "very first token": (["A"], "A"),
    "empty ones are ignored": (["", "EF"], "ABCDEF"),
    "never": (["XY"], "ABCDEFGH"),
}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_stop_words(shared: TritonServer, routing: str) -> None:
    bodies = [
        {"text_input": "ABCDEFGH", "max_tokens": 20, "stop_words": words, "return_routing": True, **ROUTINGS[routing]}
        for words, _ in STOPS.values()
    ]
    for (_, expected), (streamed, whole) in zip(STOPS.values(), both_ways(shared, bodies), strict=True):
        assert texts(streamed) == texts(whole) == expected
        assert tokens(streamed) == tokens(whole)
        assert [m.finish_reason for m in (*streamed, *whole) if m.finish_reason] == ["stop", "stop"]
        last = [message for message in streamed if message.tensors][-1]
        assert sum(last.routing["tokens"].values()) == len(tokens(streamed))
    wait_idle(shared)


def test_stop_word_of_several_bytes_across_models(shared: TritonServer) -> None:
    body = {"text_input": "é🙂漢x", "max_tokens": 30, "stop_words": ["🙂"], **ALTERNATE}
    ((streamed, whole),) = both_ways(shared, [body])
    assert texts(streamed) == texts(whole) == "é🙂"


def test_seed_alone_decides(shared: TritonServer) -> None:
    """Eight seeds under load, then in reverse order with eight others beside, then one alone."""
    policy = {"policy": "random", "policy_params": json.dumps({"p": 0.5})}

    def body(seed: int) -> dict[str, Any]:
        return {"text_input": "y" * 24, "max_tokens": 24, "seed": seed, "return_routing": True, **policy, **HOT}

    def run(seeds: list[int]) -> dict[int, tuple[Any, ...]]:
        with ThreadPoolExecutor(len(seeds)) as pool:
            replies = list(pool.map(lambda seed: answer(shared, **body(seed)), seeds))
        return {seed: (reply["output_ids"], reply["routing"]) for seed, reply in zip(seeds, replies, strict=True)}

    seeds = [0, 1, 2, 3, 4, 5, 2**63, 2**64 - 1]
    first = run(seeds)
    second = run([*reversed(seeds), *range(100, 108)])
    assert {seed: second[seed] for seed in seeds} == first
    assert len({str(ids) for ids, _ in first.values()}) == len(seeds)
    assert len({str(json.loads(routing)["runs"]) for _, routing in first.values()}) == len(seeds)
    assert run([3])[3] == first[3]


def test_routing_and_sampling_draw_independently(shared: TritonServer) -> None:
    """The routing of a seed does not depend on the temperature, its tokens do not depend on the routing."""
    fields = {"text_input": "y" * 24, "max_tokens": 24, "seed": 11, "end_id": -1, "return_routing": True}
    coin = {"policy": "random", "policy_params": json.dumps({"p": 0.5})}
    hot, cold = answer(shared, **fields, **coin, **HOT), answer(shared, **fields, **coin)
    alone = answer(shared, **fields, **ONLY_SMALL, **HOT)
    assert json.loads(hot["routing"])["runs"] == json.loads(cold["routing"])["runs"]
    assert hot["output_ids"] == alone["output_ids"] != cold["output_ids"]


def test_no_seed_twice_is_different(shared: TritonServer) -> None:
    fields = {"text_input": "y" * 24, "max_tokens": 24, "end_id": -1, **HOT}
    assert answer(shared, **fields)["output_ids"] != answer(shared, **fields)["output_ids"]


PENALTIES: dict[str, dict[str, Any]] = {
    "frequency": {"text_input": "aaaaaaaaaaaa", "frequency_penalty": 4.0},
    "presence": {"text_input": "aaaaaaaaaaaa", "presence_penalty": 11.0},
    "repetition": {"text_input": "abcabcabcabc", "repetition_penalty": 20.0},
    "bad words": {"text_input": "xyxyxyxyxyxy", "bad_words": ["xy"]},
    "min_tokens": {"text_input": "ab", "min_tokens": 9},
    "all": {
        "text_input": "abababababab",
        "frequency_penalty": 1.5,
        "presence_penalty": 2.0,
        "repetition_penalty": 1.3,
        "bad_words": ["ba", "b"],
        "min_tokens": 12,
        "seed": 5,
        **HOT,
    },
}


@pytest.mark.parametrize("penalty", PENALTIES)
def test_penalties_count_what_the_other_model_wrote(shared: TritonServer, penalty: str) -> None:
    """Both models give the same logits, so the tokens do not depend on who writes."""
    bodies = [{"max_tokens": 14, **PENALTIES[penalty], **routing} for routing in ROUTINGS.values()]
    results = both_ways(shared, bodies)
    reference = tokens(results[-1][1])
    assert [(tokens(streamed), tokens(whole)) for streamed, whole in results] == [(reference, reference)] * len(results)
    plain = answer(shared, text_input=PENALTIES[penalty]["text_input"], max_tokens=14)["output_ids"]
    assert reference != plain


def test_log_probs_across_models(shared: TritonServer) -> None:
    """Log-probabilities are those of the model that wrote the token, before temperature and penalties."""
    fields = {"text_input": "abcdef", "max_tokens": 6, "return_log_probs": True, "seed": 3, **HOT}
    results = both_ways(shared, [{**fields, **routing} for routing in ROUTINGS.values()])
    rows = []
    for streamed, whole in results:
        pieces = [float(v) for m in streamed if m.tensors for v in m.tensors["output_log_probs"][0][0]]
        assert pieces == [float(v) for v in whole[0].tensors["output_log_probs"][0][0]]
        assert len(pieces) == len(tokens(whole))
        assert float(whole[0].tensors["cum_log_probs"][0][0]) == pytest.approx(math.fsum(pieces), abs=1e-4)
        rows.append(pieces)
    assert all(row == pytest.approx(rows[0], abs=1e-5) for row in rows)
    greedy = answer(shared, text_input="abcdef", max_tokens=6, return_log_probs=True)["output_log_probs"]
    assert min(greedy) > -0.1


POLICIES: dict[str, dict[str, Any]] = {
    "scripted": PAIRS,
    "scripted, keep": KEEP,
    "random": {"policy": "random", "policy_params": json.dumps({"p": 0.4})},
    "rstitch": {"policy": "rstitch", "policy_params": json.dumps({"threshold": 0.02})},
    "rstitch, always unsure": {"policy": "rstitch", "policy_params": json.dumps({"threshold": 0.0})},
    "single": ONLY_LARGE,
}
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"seed": 77},
    "hot": {"temperature": 5.0, "seed": 1},
    "filtered": {"temperature": 7.0, "top_k": 40, "top_p": 0.9, "seed": 2**40},
    "penalties": {"temperature": 3.0, "seed": 3, "frequency_penalty": 2.0, "presence_penalty": 0.5, "min_tokens": 30},
}


@pytest.mark.parametrize("policy", POLICIES)
def test_equal_to_the_offline_engine(shared: TritonServer, offline: TokenRouter, policy: str) -> None:
    prompt = "Der Bär 🐻 isst ABCDEFGH."
    bodies = [{"max_tokens": 40, **POLICIES[policy], **sampling} for sampling in SAMPLINGS.values()]
    for body, (streamed, whole) in zip(
        bodies,
        both_ways(shared, [{"text_input": prompt, "return_routing": True, **body} for body in bodies]),
        strict=True,
    ):
        (expected,) = offline.generate([prompt], **body)
        assert tokens(streamed) == tokens(whole) == expected.tokens
        assert texts(streamed) == texts(whole) == expected.text
        routing = whole[0].routing
        assert routing["runs"] == [{"model": r.model, "start": r.start, "end": r.end} for r in expected.runs]
        assert routing["tokens"] == expected.tokens_by_model
        assert routing["handoffs"] == expected.handoffs
        assert whole[0].finish_reason == expected.finish_reason
    wait_idle(shared)


@pytest.mark.parametrize("model", ["small", "large"])
def test_direct_call_equals_the_single_policy(shared: TritonServer, model: str) -> None:
    fields = {"text_input": "direct", "max_tokens": 12, "seed": 9, **HOT}
    routed = answer(shared, **fields, policy="single", policy_params=json.dumps({"model": model}))
    assert answer(shared, model, **fields)["output_ids"] == routed["output_ids"]


def test_http_stream_equals_grpc_stream(shared: TritonServer) -> None:
    fields = {"text_input": "漢字🙂 and text", "max_tokens": 30, "seed": 9, **PAIRS, **HOT}
    events = stream(shared, **fields)
    assert "".join(event["text_output"] for event in events) == texts(grpc_stream(shared, fields))
