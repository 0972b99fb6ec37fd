"""Bad input gives one clear error that names the field, and nobody else notices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest

from tests.support.grpc_calls import GrpcStream, grpc_error
from tests.support.http_calls import answer, generate, refusal, stream
from tests.support.servers import CONTEXT, ROUTED_POOL
from tests.support.waiting import until, wait_idle
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

GOOD = {"text_input": "hello", "max_tokens": 5}
HELLO = [ord(letter) - ord("!") for letter in "hello"]
VOCAB = 260
ONLY_SMALL = {"policy": "single", "policy_params": '{"model": "small"}'}


class Neighbour:
    """A long stream beside the tests of this file, whose tokens are what they are without them."""

    PROMPT: ClassVar[list[int]] = [40 + i % 50 for i in range(60_000)]

    def __init__(self, server: TritonServer) -> None:
        self._server = server
        self._call: GrpcStream | None = None
        self._pid = self._messages = self._tokens = 0

    def run(self) -> None:
        """Starts it, again if it has ended or if the server is a new one."""
        if self._call is not None and self._pid == self._server.pid and not self._call.over():
            return
        self.close()
        self._call = call = GrpcStream(self._server)
        self._pid, self._messages, self._tokens = self._server.pid, 0, 0
        call.send({"input_ids": self.PROMPT, "max_tokens": len(self.PROMPT), "stream": True})
        until(lambda: call.messages, what="the first token")

    def check(self) -> None:
        """It goes on, and its tokens since the last look are right. Nothing to check beside a server that died."""
        call = self._call
        if call is None or self._pid != self._server.pid:
            return
        until(lambda: len(call.messages) > self._messages or call.over(), what="another token")
        for message in call.messages[self._messages :]:
            assert not message.error
            assert message.ids == self.PROMPT[self._tokens : self._tokens + len(message.ids)]
            self._tokens += len(message.ids)
            self._messages += 1

    def close(self) -> None:
        if self._call is not None:
            self._call.__exit__(None)


@pytest.fixture(scope="module")
def neighbour(shared: TritonServer) -> Iterator[Neighbour]:
    running = Neighbour(shared)
    yield running
    running.close()
    wait_idle(shared)


@pytest.fixture(autouse=True)
def undisturbed(neighbour: Neighbour) -> Iterator[None]:
    neighbour.run()
    yield
    neighbour.check()


@pytest.fixture(autouse=True)
def still_serving(shared: TritonServer) -> Iterator[None]:
    """After every refusal the next request is answered."""
    yield
    assert answer(shared, **GOOD)["output_ids"] == HELLO


HTTP_CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no prompt": ({"text_input": None}, ("text_input", "missing")),
    "empty prompt": ({"text_input": ""}, ("text_input", "empty")),
    "no max_tokens": ({"max_tokens": None}, ("max_tokens", "missing")),
    "max_tokens 0": ({"max_tokens": 0}, ("max_tokens is 0",)),
    "max_tokens negative": ({"max_tokens": -1}, ("max_tokens is -1",)),
    "max_tokens huge": ({"max_tokens": 2**31 - 1}, ("max_tokens (2147483647)", "'large'", str(ROUTED_POOL))),
    "max_tokens beyond the context": ({"max_tokens": CONTEXT, **ONLY_SMALL}, ("'small'", f"context of {CONTEXT}")),
    "max_tokens beyond the pool": ({"max_tokens": 160_000}, ("'large'", str(ROUTED_POOL))),
    "min_tokens": ({"min_tokens": 6}, ("min_tokens is 6", "max_tokens")),
    "temperature": ({"temperature": -0.5}, ("temperature is -0.5",)),
    "top_p 2": ({"top_p": 2.0}, ("top_p is 2",)),
    "top_p negative": ({"top_p": -1.0}, ("top_p is -1",)),
    "top_k": ({"top_k": -1}, ("top_k is -1",)),
    "repetition_penalty": ({"repetition_penalty": 0.0}, ("repetition_penalty is 0",)),
    "end_id": ({"end_id": VOCAB}, (f"end_id is {VOCAB}",)),
    "id beyond the vocabulary": ({"text_input": None, "input_ids": [1, VOCAB]}, ("input_ids[1]", str(VOCAB))),
    "negative id": ({"text_input": None, "input_ids": [-1, 1]}, ("input_ids[0] is -1",)),
    "text and ids": ({"input_ids": [1, 2]}, ("text_input", "input_ids")),
    "unknown policy": ({"policy": "best"}, ("policy is 'best'", "rstitch")),
    "not offered policy": ({"policy": "os:PathLike"}, ("policy is 'os:PathLike'",)),
    "policy_params no JSON": ({"policy_params": "{"}, ("policy_params", "JSON")),
    "policy_params list": ({"policy_params": "[]"}, ("policy_params",)),
    "policy_params unknown key": (
        {"policy": "rstitch", "policy_params": '{"treshold": 0.5}'},
        ("policy_params", "treshold", "threshold"),
    ),
    "policy_params wrong type": (
        {"policy": "rstitch", "policy_params": '{"threshold": "high"}'},
        ("policy_params", "threshold"),
    ),
    "policy_params out of range": ({"policy": "random", "policy_params": '{"p": 1.5}'}, ("p", "1.5")),
    "policy_params NaN": ({"policy": "random", "policy_params": '{"p": NaN}'}, ("policy_params",)),
    "policy_params unknown model": (
        {"policy_params": '{"writers": ["medium"]}'},
        ("writers", "medium", "small, large"),
    ),
    "beam_width": ({"beam_width": 2}, ("beam_width", "2")),
    "num_return_sequences": ({"num_return_sequences": 3}, ("num_return_sequences", "3")),
    "length_penalty": ({"length_penalty": 2.0}, ("length_penalty",)),
    "decoder_text_input": ({"decoder_text_input": "x"}, ("decoder_text_input",)),
    "return_context_logits": ({"return_context_logits": True}, ("return_context_logits",)),
    "return_generation_logits": ({"return_generation_logits": True}, ("return_generation_logits",)),
    "prompt_vocab_size": ({"prompt_vocab_size": 5}, ("prompt_vocab_size",)),
    "prompt_table_extra_id": ({"prompt_table_extra_id": 5}, ("prompt_table_extra_id",)),
    "embedding_bias_words": ({"embedding_bias_words": ["x", "y"]}, ("embedding_bias_words",)),
    "embedding_bias_weights": ({"embedding_bias_weights": [0.5, 1.0]}, ("embedding_bias_weights",)),
    "num_draft_tokens": ({"num_draft_tokens": 2}, ("num_draft_tokens",)),
    "use_draft_logits": ({"use_draft_logits": True}, ("use_draft_logits",)),
    "lora_task_id": ({"lora_task_id": 1}, ("lora_task_id",)),
    "guided_decoding_guide_type": ({"guided_decoding_guide_type": "json"}, ("guided_decoding_guide_type",)),
    "guided_decoding_guide": ({"guided_decoding_guide": "{}"}, ("guided_decoding_guide",)),
    "image_url_input": ({"image_url_input": ["http://x", "http://y"]}, ("image_url_input",)),
}


def body_of(changes: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in {**GOOD, **changes}.items() if value is not None}


@pytest.mark.parametrize("case", HTTP_CASES)
def test_http(shared: TritonServer, case: str) -> None:
    changes, words = HTTP_CASES[case]
    status, message = refusal(shared, **body_of(changes))
    assert status == 400, message
    assert all(word in message for word in words), message


@pytest.mark.parametrize("case", ["empty prompt", "max_tokens 0", "unknown policy", "beam_width"])
def test_http_stream_is_one_event(shared: TritonServer, case: str) -> None:
    changes, words = HTTP_CASES[case]
    events = stream(shared, **body_of(changes))
    assert [list(event) for event in events] == [["error"]]
    assert all(word in events[0]["error"] for word in words)


@pytest.mark.parametrize("model", ["ensemble", "small"])
@pytest.mark.parametrize("case", ["no prompt", "max_tokens 0", "top_p 2", "id beyond the vocabulary"])
def test_other_models_refuse_alike(shared: TritonServer, model: str, case: str) -> None:
    changes, words = HTTP_CASES[case]
    status, message = refusal(shared, model, **body_of(changes))
    assert status == 400
    assert all(word in message for word in words), message


@pytest.mark.parametrize("model", ["small", "large"])
def test_a_single_model_takes_no_policy(shared: TritonServer, model: str) -> None:
    status, message = refusal(shared, model, **GOOD, policy="random")
    assert status == 400
    assert "policy" in message


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"text_input": "a", "max_tokens": NaN}',
        b'{"text_input": "a", "max_tokens": 5, "temperature": "0.5"}',
        b'{"text_input": "a", "max_tokens": 5.7}',
        b'{"text_input": "a", "max_tokens": 5, "seed": -1}',
        b'{"text_input": 7, "max_tokens": 5}',
        b'{"text_input": "a", "max_tokens": [5, 6]}',
        b'{"text_input": "a", "max_tokens": 99999999999}',
    ],
)
def test_body_that_triton_itself_refuses(shared: TritonServer, body: bytes) -> None:
    """Never a response, never a crash; the words are Triton's."""
    status, reply = generate(shared, body)
    assert status in (400, 500)
    assert reply["error"]


@pytest.mark.parametrize("model", ["tokenrouter", "ensemble", "small"])
def test_misspelt_field(shared: TritonServer, model: str) -> None:
    """/generate turns keys that are no tensor into request parameters; they are not ignored in silence."""
    status, message = refusal(shared, model, **GOOD, temprature=0.1)
    assert status == 400
    assert "'temprature'" in message
    assert "temperature?" in message


NUMBERS = {"NaN": float("nan"), "infinite": float("inf"), "minus infinite": float("-inf")}
NUMBER_FIELDS = (
    "temperature",
    "top_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "length_penalty",
)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("name", NUMBER_FIELDS)
def test_grpc_numbers_that_are_none(shared: TritonServer, name: str, number: str) -> None:
    code, details = grpc_error(shared, {**GOOD, name: NUMBERS[number]})
    assert code == "INVALID_ARG"
    assert name in details


TRITON_CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "two prompts in a row": ({"text_input": np.array([["a", "b"]], np.object_)}, ("text_input",)),
    "temperature FP64": ({"temperature": np.array([[0.5]], np.float64)}, ("temperature", "FP32", "FP64")),
    "seed INT64": ({"seed": np.array([[-1]], np.int64)}, ("seed", "UINT64", "INT64")),
    "max_tokens INT64": ({"max_tokens": np.array([[5]], np.int64)}, ("max_tokens", "INT32", "INT64")),
    "no batch dimension": ({"max_tokens": np.array([5], np.int32)}, ("max_tokens",)),
    "unknown tensor": ({"temprature": np.array([[0.1]], np.float32)}, ("temprature",)),
}


@pytest.mark.parametrize("case", TRITON_CASES)
def test_grpc_that_triton_itself_refuses(shared: TritonServer, case: str) -> None:
    """Triton names the tensor; the stream stays usable.

    Triton 2.51 never lets go of such a request, so its model cannot unload any more and a server that stops uses up its
    grace time.
    """
    changes, words = TRITON_CASES[case]
    with GrpcStream(shared) as call:
        call.send(body_of(changes))
        until(lambda: call.messages, what="the error")
        assert all(word in call.messages[0].error for word in words), call.messages
        call.send(GOOD, request_id="good")
        assert call.wait("good")[0].ids == HELLO


GRPC_CASES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "empty ids": ({"input_ids": np.zeros((1, 0), np.int32), "text_input": None}, ("input_ids",)),
    "no UTF-8": ({"text_input": np.array([[b"ab\xff"]], np.object_)}, ("text_input", "UTF-8", "byte 2")),
    "stop word no UTF-8": ({"stop_words": np.array([[b"\xc3"]], np.object_)}, ("stop_words", "UTF-8")),
    "two rows": (
        {"text_input": np.array([["a"], ["b"]], np.object_), "max_tokens": np.array([[3], [3]], np.int32)},
        ("one prompt per request", "2 rows"),
    ),
    "lora_weights": ({"lora_weights": np.zeros((1, 2, 2), np.float16)}, ("lora_weights",)),
    "lora_config": ({"lora_config": np.zeros((1, 2, 3), np.int32)}, ("lora_config",)),
    "prompt_embedding_table": ({"prompt_embedding_table": np.zeros((1, 2, 2), np.float16)}, ("prompt_embedding",)),
    "image_bytes_input": ({"image_bytes_input": np.zeros((1, 1, 1, 1, 1), np.uint8)}, ("image_bytes_input",)),
    "video_bytes_input": ({"video_bytes_input": np.zeros((1, 1, 1, 1, 1), np.uint8)}, ("video_bytes_input",)),
    "image_input": ({"image_input": np.zeros((1, 1, 1, 1, 1), np.float16)}, ("image_input",)),
}


@pytest.mark.parametrize("case", GRPC_CASES)
def test_grpc(shared: TritonServer, case: str) -> None:
    changes, words = GRPC_CASES[case]
    code, details = grpc_error(shared, body_of(changes))
    assert code == "INVALID_ARG", details
    assert all(word in details for word in words), details


def test_prompt_longer_than_the_context(shared: TritonServer) -> None:
    status, message = refusal(shared, text_input="x" * (CONTEXT + 1), max_tokens=1, **ONLY_SMALL)
    assert status == 400
    assert f"prompt ({CONTEXT + 1} tokens)" in message
    assert f"context of {CONTEXT}" in message


def test_prompt_that_fits_only_alone(shared: TritonServer) -> None:
    """One model's context and pool are enough, the other's pool is not: refused only if both are visited."""
    fields = {"text_input": "x" * (ROUTED_POOL - 2), "max_tokens": 3}
    status, message = refusal(shared, **fields)
    assert status == 400
    assert "'large'" in message
    assert answer(shared, **fields, **ONLY_SMALL)["output_ids"] == [ord("x") - ord("!")] * 3


@pytest.mark.parametrize(
    "extreme",
    [
        {"temperature": 1e-6},
        {"temperature": 1e6, "seed": 1},
        {"top_k": 10**9},
        {"top_p": 1e-6, "seed": 1},
        {"repetition_penalty": 1e-6, "seed": 1},
        {"frequency_penalty": -1e30},
        {"stop_words": ["", ""]},
        {"bad_words": [""]},
        {"temperature": 0.0},
        {"min_tokens": 5},
        {"seed": 2**64 - 1, "temperature": 1.0},
        {"pad_id": -5},
    ],
    ids=str,
)
def test_extreme_but_valid(shared: TritonServer, extreme: dict[str, Any]) -> None:
    reply = answer(shared, **{**GOOD, "max_tokens": 8}, **extreme)
    assert reply["output_ids"]
    if "temperature" not in extreme or extreme["temperature"] < 1:
        assert len(reply["output_ids"]) <= 8


# --- request ids --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", ["", "a\x00b", "ü🙂", "x" * 1_000_000], ids=["empty", "NUL", "text", "1 MB"])
def test_any_request_id_is_only_echoed(shared: TritonServer, request_id: str) -> None:
    with GrpcStream(shared) as call:
        for _ in range(2):
            call.send(GOOD, request_id=request_id)
        until(lambda: sum(message.final for message in call.messages) == 2, what="both answers")
    assert [message.ids for message in call.messages if message.tensors] == [HELLO] * 2
    # Triton ends an id at a NUL in some of its messages.
    assert {message.request_id.split("\x00")[0] for message in call.messages} == {request_id.split("\x00")[0]}


def test_one_id_for_two_requests_and_cancel_of_one(shared: TritonServer) -> None:
    with GrpcStream(shared) as kept:
        with GrpcStream(shared) as cancelled:
            for call, letter in ((kept, "k"), (cancelled, "c")):
                call.send({"text_input": letter * 400, "max_tokens": 400, "stream": True}, request_id="same")
            until(lambda: kept.of("same") and cancelled.of("same"), what="both streams")
            cancelled.cancel()
        # Sent again at once, with the same id.
        again = GrpcStream(shared)
        with again:
            again.send({"text_input": "r" * 9, "max_tokens": 9, "stream": True}, request_id="same")
            retried = again.wait("same")
        messages = kept.wait("same")
    assert "".join(message.text for message in messages) == "k" * 400
    assert "".join(message.text for message in retried) == "r" * 9
