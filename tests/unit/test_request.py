from __future__ import annotations

import json
import math
import re
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors

from tests.support.repositories import END_ID, VOCAB_SIZE, byte_tokenizer
from tokenrouter.errors import ConfigError, InvalidRequest, PolicyFailed
from tokenrouter.messages import PolicySpec
from tokenrouter.policies import PolicyCache, PolicyContext
from tokenrouter.request import MAX_INT32, MAX_SEED, Defaults, Limits, RequestBuilder, RequestFields

TOKENIZER = byte_tokenizer()


def builder(tokenizer: Tokenizer = TOKENIZER, **fields: Any) -> RequestBuilder:
    fields.setdefault("vocab_size", VOCAB_SIZE)
    fields.setdefault("selectable", frozenset({"single", "random"}))
    deployed = PolicySpec("rstitch", '{"threshold": 0.03}')
    return RequestBuilder(tokenizer=tokenizer, end_ids=(END_ID,), policy=deployed, **fields)


def build(**fields: Any) -> Any:
    if "input_ids" not in fields:
        fields.setdefault("text_input", "hi")
    fields.setdefault("max_tokens", 8)
    return builder().build(RequestFields(**fields))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        pytest.param({"max_tokens": None}, "max_tokens is missing", id="max-tokens-missing"),
        pytest.param({"max_tokens": 0}, "max_tokens is 0; it lies in 1..", id="max-tokens-zero"),
        pytest.param({"max_tokens": -1}, "max_tokens is -1", id="max-tokens-negative"),
        pytest.param({"max_tokens": 2**31}, "max_tokens is 2147483648", id="max-tokens-beyond-int32"),
        pytest.param({"min_tokens": 9}, r"min_tokens is 9; it lies in 0..max_tokens \(8\)", id="min-above-max"),
        pytest.param({"min_tokens": -1}, "min_tokens is -1", id="min-tokens-negative"),
        pytest.param({"text_input": ""}, "text_input is empty", id="empty-text"),
        pytest.param({"text_input": None}, "text_input is empty or missing", id="no-prompt"),
        pytest.param({"input_ids": []}, "input_ids is empty", id="no-ids"),
        pytest.param({"text_input": "a", "input_ids": [1]}, "both text_input and input_ids", id="two-prompts"),
        pytest.param({"input_ids": [1, -1]}, r"input_ids\[1\] is -1", id="negative-id"),
        pytest.param({"input_ids": [VOCAB_SIZE]}, rf"\[0\] is {VOCAB_SIZE}; .* \[0, {VOCAB_SIZE}\)", id="id-too-large"),
        pytest.param({"temperature": math.nan}, "temperature is nan", id="temperature-nan"),
        pytest.param({"temperature": math.inf}, "temperature is inf", id="temperature-infinite"),
        pytest.param({"temperature": -1.0}, "temperature is -1.0; .* at least 0", id="temperature-negative"),
        pytest.param({"top_p": math.nan}, "top_p is nan", id="top-p-nan"),
        pytest.param({"top_p": -0.5}, r"top_p is -0.5; it lies in \(0, 1\], and 0 turns it off", id="top-p-negative"),
        pytest.param({"top_p": 1.0000001}, "top_p is 1.0000001", id="top-p-above-one"),
        pytest.param({"top_p": -math.inf}, "top_p is -inf", id="top-p-infinite"),
        pytest.param({"top_k": -1}, "top_k is -1", id="top-k-negative"),
        pytest.param({"repetition_penalty": 0.0}, "repetition_penalty is 0.0; .* above 0", id="repetition-zero"),
        pytest.param({"repetition_penalty": math.nan}, "repetition_penalty is nan", id="repetition-nan"),
        pytest.param({"repetition_penalty": math.inf}, "repetition_penalty is inf", id="repetition-infinite"),
        pytest.param({"presence_penalty": math.nan}, "presence_penalty is nan", id="presence-nan"),
        pytest.param({"frequency_penalty": -math.inf}, "frequency_penalty is -inf", id="frequency-infinite"),
        pytest.param({"seed": -1}, "seed is -1", id="seed-negative"),
        pytest.param({"seed": 2**64}, "seed is 18446744073709551616", id="seed-beyond-64-bits"),
        pytest.param({"end_id": -2}, "end_id is -2", id="end-id-negative"),
        pytest.param({"end_id": VOCAB_SIZE}, f"end_id is {VOCAB_SIZE}", id="end-id-too-large"),
        pytest.param({"policy": "me"}, "policy is 'me'; this deployment offers: random, rstitch, single", id="policy"),
        pytest.param({"policy": "os:system"}, "policy is 'os:system'", id="policy-by-path"),
    ],
)
def test_a_bad_input_is_refused_with_its_name_and_value(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        build(**fields)


def test_a_request_without_options_is_greedy_and_ends_at_the_models_end() -> None:
    request = build()
    assert (request.prompt, request.tokens) == ("hi", TOKENIZER.encode("hi").ids)
    s = request.sampling
    assert (s.temperature, s.top_k, s.top_p, s.min_tokens, s.end_ids) == (0.0, 0, 1.0, 0, (END_ID,))
    assert (s.repetition_penalty, s.presence_penalty, s.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (s.bad_words, s.log_probs, request.stop_words, request.stream) == ((), False, (), False)
    assert request.policy == PolicySpec("rstitch", '{"threshold": 0.03}')


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        pytest.param({}, 0.0, id="nothing-asked"),
        pytest.param({"top_p": 0.0, "top_k": 0}, 0.0, id="filters-that-are-off"),
        pytest.param({"top_p": 0.0, "top_k": 5}, 1.0, id="one-filter-is-off"),
        pytest.param({"top_p": 0.9}, 1.0, id="top-p-alone-samples"),
        pytest.param({"top_k": 5}, 1.0, id="top-k-alone-samples"),
        pytest.param({"temperature": 0.0, "top_p": 0.9}, 0.0, id="zero-is-greedy"),
        pytest.param({"temperature": 1e6}, 1e6, id="absurd-but-finite"),
    ],
)
def test_sampling_begins_where_any_of_its_options_is_given(fields: dict[str, Any], temperature: float) -> None:
    assert build(**fields).sampling.temperature == temperature


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        pytest.param({"max_tokens": MAX_INT32}, "max_tokens", MAX_INT32, id="largest-max-tokens"),
        pytest.param({"top_k": 10**9}, "top_k", 10**9, id="huge-top-k"),
        pytest.param({"top_k": 0, "temperature": 0.5}, "top_k", 0, id="top-k-off"),
        pytest.param({"top_p": 0.0, "temperature": 0.5}, "top_p", 1.0, id="top-p-off"),
        pytest.param({"seed": 0}, "seed", 0, id="seed-zero"),
        pytest.param({"seed": MAX_SEED}, "seed", MAX_SEED, id="largest-seed"),
        pytest.param({"end_id": -1}, "end_ids", (), id="no-end"),
        pytest.param({"end_id": 0}, "end_ids", (0,), id="own-end"),
        pytest.param({"min_tokens": 8}, "min_tokens", 8, id="min-equals-max"),
        pytest.param({"bad_words": ["", "A", "BC"]}, "bad_words", ((32,), (33, 34)), id="bad-words"),
    ],
)
def test_values_at_the_edge_are_taken_as_they_are(fields: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(build(**fields).sampling, name) == value


def test_seeds_that_are_not_given_differ() -> None:
    assert len({build().sampling.seed for _ in range(50)}) == 50


def test_ids_behind_the_length_are_padding() -> None:
    assert build(input_ids=[5, 6, 0, 0], input_length=2).tokens == [5, 6]
    for length in (0, 5, -1):
        with pytest.raises(InvalidRequest, match=rf"input_lengths is {length}; it lies in 1..input_ids \(4\)"):
            build(input_ids=[5, 6, 0, 0], input_length=length)


def test_words_may_be_given_as_ids() -> None:
    words = [TOKENIZER.encode("A").ids, TOKENIZER.encode("BC").ids]
    request = build(stop_word_ids=words, bad_word_ids=[*words, [VOCAB_SIZE]], stop_words=["x"])
    assert request.stop_words == ("x", "A", "BC")
    assert request.sampling.bad_words == tuple(map(tuple, words))
    assert build(stop_word_ids=[[END_ID - 1], [END_ID]], end_id=-1).sampling.end_ids == (END_ID,)


@pytest.mark.parametrize("name", ["stop_word", "bad_word"])
def test_words_as_ids_are_limited_like_others(name: str) -> None:
    made = builder(limits=Limits(words=2))
    with pytest.raises(InvalidRequest, match=rf"{name}s has 3 values; this deployment takes at most 2 .limits\.words"):
        made.build(RequestFields(text_input="hi", max_tokens=1, **{f"{name}_ids": [[1], [2], [3]]}))


def test_empty_stop_words_are_ignored() -> None:
    assert build(stop_words=["", "x"]).stop_words == ("x",)


@pytest.mark.parametrize(
    ("fields", "policy"),
    [
        pytest.param({"policy": "random"}, PolicySpec("random", "{}"), id="another-without-parameters"),
        pytest.param({"policy": "random", "policy_params": '{"p":1}'}, PolicySpec("random", '{"p":1}'), id="another"),
        pytest.param(
            {"policy": "rstitch"}, PolicySpec("rstitch", '{"threshold": 0.03}'), id="the-deployment's-by-name"
        ),
        pytest.param({"policy_params": "{}"}, PolicySpec("rstitch", "{}"), id="only-parameters"),
        pytest.param(
            {"policy_params": {"threshold": 0.02}}, PolicySpec("rstitch", '{"threshold":0.02}'), id="a-mapping"
        ),
        pytest.param({"policy_params": {}}, PolicySpec("rstitch", "{}"), id="an-empty-mapping"),
    ],
)
def test_a_client_may_choose_a_policy_that_the_deployment_offers(fields: dict[str, Any], policy: PolicySpec) -> None:
    assert build(**fields).policy == policy


@pytest.mark.parametrize("params", [5, ["threshold"], {"threshold": object()}])
def test_parameters_that_are_no_json_object_are_refused_with_the_remedy(params: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"policy_params is .*; send a JSON object, as text or as a mapping"):
        build(policy_params=params)


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        pytest.param("random", "{", "policy_params is not valid JSON", id="no-json"),
        pytest.param("random", "[]", "policy_params of 'random'.*known parameters: p", id="no-object"),
        pytest.param("random", '{"q": 1}', "unknown field `q`.*known parameters: p", id="unknown-key"),
        pytest.param("random", '{"p": "x"}', r"Expected `float`, got `str` - at `\$.p`", id="wrong-type"),
        pytest.param("random", '{"p": 1.5}', r"policy_params.p is 1.5; it lies in \[0, 1\]", id="out-of-range"),
        pytest.param("random", '{"p": NaN}', "policy_params is not valid JSON", id="nan"),
        pytest.param("random", '{"p": 1e999}', "policy_params", id="infinite"),
        pytest.param("single", '{"model": "huge"}', "policy_params.model is 'huge'; known: small, large", id="model"),
        pytest.param("scripted", "{}", "missing required field `writers`", id="missing"),
        pytest.param("nothing", "{}", "policy is 'nothing'; known: ", id="unknown-policy"),
        pytest.param("no.such.module:Class", "{}", "cannot be imported", id="unknown-module"),
        pytest.param("tests.unit.faulty_policies:Nobody", "{}", "cannot be imported", id="unknown-class"),
        pytest.param("tests.unit.faulty_policies:FAULTS", "{}", "not a subclass", id="no-policy"),
    ],
)
def test_bad_policy_parameters_name_the_key(name: str, params: str, says: str) -> None:
    cache = PolicyCache(PolicyContext(("small", "large")))
    with pytest.raises(InvalidRequest, match=says):
        cache.get(PolicySpec(name, params))


def test_a_two_model_policy_is_refused_in_a_deployment_of_three() -> None:
    with pytest.raises(ConfigError, match="'random' routes between two models; this deployment has a, b, c"):
        PolicyCache(PolicyContext(("a", "b", "c"))).get(PolicySpec("random"))


def test_equal_specifications_share_an_instance_and_the_oldest_make_room() -> None:
    specs = [PolicySpec("random", f'{{"p": 0.{i}}}') for i in range(3)]
    one = PolicyCache(PolicyContext(("small", "large")))
    one.get(specs[0])
    cache = PolicyCache(PolicyContext(("small", "large")), most_bytes=5 * one.bytes_held // 2)
    first, second = cache.get(specs[0]), cache.get(specs[1])
    assert cache.get(specs[0]) is first
    cache.get(specs[2])
    assert cache.get(specs[0]) is first
    assert cache.found(specs[1]) is None
    assert cache.get(specs[1]) is not second
    assert cache.bytes_held <= 5 * one.bytes_held // 2


def test_a_policy_over_the_bound_is_served_alone_and_a_pinned_one_stays() -> None:
    cache = PolicyCache(PolicyContext(("small", "large")), most_bytes=1)
    own, other, third = [PolicySpec("random", f'{{"p": 0.{i}}}') for i in range(3)]
    pinned = cache.pin(own)
    assert cache.get(other) is cache.found(other)
    cache.get(third)
    assert cache.found(own) is pinned
    assert cache.found(other) is None


def test_parameters_count_with_what_they_hold() -> None:
    cache = PolicyCache(PolicyContext(("small", "large")))
    cache.get(PolicySpec("scripted", '{"writers": ["small"]}'))
    few = cache.bytes_held
    cache.get(PolicySpec("scripted", f'{{"writers": {json.dumps(["small", "large"] * 5000)}}}'))
    assert cache.bytes_held > few + 5000 * 2 * 8


def test_a_policy_that_visits_unknown_models_is_refused() -> None:
    params = '{"method": "visited", "fault": "returns_unknown_model"}'
    with pytest.raises(PolicyFailed, match=r"visited: .*nowhere"):
        PolicyCache(PolicyContext(("small", "large"))).get(PolicySpec("tests.unit.faulty_policies:Faulty", params))


# --- tokenizers -------------------------------------------------------------------------------------------------------


def with_bos() -> Tokenizer:
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", END_ID)]
    )
    return tokenizer


def test_an_empty_text_is_refused_even_if_the_tokenizer_adds_a_beginning() -> None:
    with pytest.raises(InvalidRequest, match="text_input is empty"):
        builder(with_bos()).build(RequestFields(text_input="", max_tokens=1))
    assert builder(with_bos()).build(RequestFields(text_input="A", max_tokens=1)).tokens == [END_ID, 32]


@pytest.mark.parametrize(
    ("text", "add", "tokens"),
    [
        pytest.param("<|endoftext|>A", True, [END_ID, 32], id="in-the-text"),
        pytest.param("<|endoftext|><|endoftext|>A", True, [END_ID, END_ID, 32], id="twice-in-the-text"),
        pytest.param("A", True, [END_ID, 32], id="added"),
        pytest.param("A<|endoftext|>", True, [END_ID, 32, END_ID], id="elsewhere"),
        pytest.param("A", False, [32], id="not-wanted"),
        pytest.param("<|endoftext|>A", False, [END_ID, 32], id="only-in-the-text"),
    ],
)
def test_a_prompt_that_begins_with_the_beginning_of_sequence_gets_no_second(
    text: str, add: bool, tokens: list[int]
) -> None:
    fields = RequestFields(text_input=text, max_tokens=1, add_special_tokens=add)
    assert builder(with_bos()).build(fields).tokens == tokens


def test_a_bad_word_has_no_beginning_of_sequence() -> None:
    request = builder(with_bos()).build(RequestFields(text_input="A", max_tokens=1, bad_words=["B"]))
    assert request.sampling.bad_words == ((33,),)


def byte_pairs(*, prefix: bool) -> Tokenizer:
    """ "cat" is a token, and so is " cat"; with `prefix` every text begins with a space."""
    vocabulary = {"c": 0, "a": 1, "t": 2, "Ġ": 3, "ca": 4, "cat": 5, "Ġcat": 6, "Ċ": 7}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("c", "a"), ("ca", "t"), ("Ġ", "cat")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    return tokenizer


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("word", ["cat", " cat"])
def test_a_bad_word_is_banned_with_and_without_a_space_in_front(prefix: bool, word: str) -> None:
    request = builder(byte_pairs(prefix=prefix), vocab_size=8)
    got = request.build(RequestFields(text_input="c", max_tokens=1, bad_words=[word])).sampling.bad_words
    assert set(got) >= ({(5,), (6,)} if word == "cat" else {(6,)})


@pytest.mark.parametrize(
    ("fields", "end_ids"),
    [
        pytest.param({}, (END_ID,), id="the-end-itself"),
        pytest.param({"end_id": -1}, (END_ID,), id="no-end"),
        pytest.param({"end_id": 5}, (5, END_ID), id="another-end"),
    ],
)
def test_a_stop_word_that_is_a_special_token_ends_by_its_id(fields: dict[str, Any], end_ids: tuple[int, ...]) -> None:
    request = build(stop_words=["<|endoftext|>", "x"], **fields)
    assert (request.sampling.end_ids, request.stop_words) == (end_ids, ("x",))


def test_a_text_that_the_tokenizer_drops_entirely_is_refused() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.Replace("\x07", "")
    with pytest.raises(InvalidRequest, match="text_input gives no token"):
        builder(tokenizer).build(RequestFields(text_input="\x07", max_tokens=1))


def test_a_text_with_tokens_beyond_the_models_vocabulary_is_refused_and_such_bad_words_are_void() -> None:
    """A tokenizer may know tokens that the model has no embedding for, for example padding."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([AddedToken("<pad>", special=True)])
    with pytest.raises(InvalidRequest, match=f"text_input.*{VOCAB_SIZE}"):
        builder(tokenizer).build(RequestFields(text_input="a<pad>b", max_tokens=1))
    request = builder(tokenizer).build(RequestFields(text_input="a", max_tokens=1, bad_words=["<pad>", "A"]))
    assert request.sampling.bad_words == ((32,),)


def test_token_ids_are_taken_as_they_are() -> None:
    request = build(input_ids=[32, END_ID, 33])
    assert request.tokens == [32, END_ID, 33]
    assert request.prompt == "AB"


# --- defaults ---------------------------------------------------------------------------------------------------------


def test_a_deployments_defaults_hold_for_what_is_left_out() -> None:
    made = builder(defaults=Defaults(max_tokens=7))
    assert made.build(RequestFields(text_input="hi")).sampling.max_tokens == 7
    assert made.build(RequestFields(text_input="hi", max_tokens=3)).sampling.max_tokens == 3


@pytest.mark.parametrize(
    ("default", "asked", "begins"), [(True, None, True), (False, None, False), (False, True, True)]
)
def test_special_tokens_by_default(default: bool, asked: bool | None, begins: bool) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(["<s>"])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    made = builder(tokenizer=tokenizer, vocab_size=bos + 1, defaults=Defaults(add_special_tokens=default))
    for text in ("hi", "<s>hi"):
        tokens = made.build(RequestFields(text_input=text, max_tokens=1, add_special_tokens=asked)).tokens
        assert tokens.count(bos) == (1 if begins or text != "hi" else 0)


@pytest.mark.parametrize("most", [0, -1, 2**31])
def test_a_default_that_no_request_could_ask_for_is_refused(most: int) -> None:
    with pytest.raises(ValueError, match=f"defaults.max_tokens is {most}"):
        Defaults(max_tokens=most)


# --- limits -----------------------------------------------------------------------------------------------------------

LIMITS = Limits(prompt_bytes=8, prompt_ids=3, words=2, word_bytes=4, policy_params_bytes=12, timeout_seconds=5)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"text_input": "123456789"}, "text_input has 9 bytes; this deployment takes at most 8 (limits.prompt_bytes)"),
        ({"text_input": "ü" * 5}, "text_input has 10 bytes"),
        ({"input_ids": [1, 2, 3, 4]}, "input_ids has 4 values; this deployment takes at most 3 (limits.prompt_ids)"),
        ({"text_input": "a", "stop_words": ["a", "b", "c"]}, "stop_words has 3 values"),
        ({"text_input": "a", "bad_words": ["a", "bcdef"]}, "bad_words[1] has 5 bytes"),
        ({"text_input": "a", "policy_params": " " * 13}, "policy_params has 13 bytes"),
    ],
)
def test_what_is_over_a_limit_is_refused_by_field_limit_and_value(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=re.escape(text)):
        builder(limits=LIMITS).build(RequestFields(max_tokens=1, **fields))


def test_what_is_at_its_limit_is_taken() -> None:
    fields = {"text_input": "12345678", "stop_words": ["abcd", "b"], "policy_params": "{}" + " " * 10}
    assert builder(limits=LIMITS).build(RequestFields(max_tokens=1, **fields)).tokens  # type: ignore[arg-type]


def test_a_time_out_has_a_limit_too() -> None:
    assert LIMITS.timeout_ns(5_000_000) == 5 * 10**9
    with pytest.raises(InvalidRequest, match=r"timeout is 5000001 microseconds; .* at most 5 "):
        LIMITS.timeout_ns(5_000_001)


def test_a_limit_of_zero_is_none() -> None:
    with pytest.raises(ValueError, match=r"limits\.words is 0"):
        Limits(words=0)
