"""The closed loop against a gRPC server that answers with fixed messages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2

from tools import load
from tools.errors import CommandError
from tools.load import ClosedLoop, LoadError, in_turn, read_prompts, request_bytes, stages

MODEL = "tokenrouter"


class Answering:
    """Answers a request with two messages: its prompt, and its prompt again with the finish reason."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.may_answer = threading.Event()
        self.may_answer.set()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.stream_stream_rpc_method_handler(
            self.answer,
            request_deserializer=service_pb2.ModelInferRequest.FromString,
            response_serializer=service_pb2.ModelStreamInferResponse.SerializeToString,
        )

    def answer(
        self, requests: Iterator[service_pb2.ModelInferRequest], context: grpc.ServicerContext
    ) -> Iterator[service_pb2.ModelStreamInferResponse]:
        for request in requests:
            prompt = request.raw_input_contents[0][4:].decode()
            self.seen.append(prompt)
            self.may_answer.wait(10)
            if prompt == "refused":
                yield service_pb2.ModelStreamInferResponse(error_message="no room\nfor you")
                continue
            yield message(request.id, text_output=prompt)
            yield message(request.id, text_output=prompt, finish_reason="stop")


def message(request_id: str, **texts: str) -> service_pb2.ModelStreamInferResponse:
    answer = service_pb2.ModelStreamInferResponse()
    answer.infer_response.id = request_id
    for name, text in texts.items():
        answer.infer_response.outputs.add(name=name, datatype="BYTES", shape=[1])
        raw = text.encode()
        answer.infer_response.raw_output_contents.append(len(raw).to_bytes(4, "little") + raw)
    return answer


@pytest.fixture
def answering() -> Answering:
    return Answering()


@pytest.fixture
def url(answering: Answering) -> Iterator[str]:
    class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
            return answering.service(details)

    server = grpc.server(ThreadPoolExecutor(4), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def request(number: int) -> bytes | None:
    return request_bytes(MODEL, f"p{number}", max_tokens=4, request_id=str(number)) if number < 9 else None


def test_a_closed_loop_sends_everything_once_and_knows_what_came(url: str, answering: Answering) -> None:
    with ClosedLoop(url, request, 3, keep=True) as loop:
        for seconds in loop.ticks():
            if loop.over:
                break
            assert seconds < 10
        came = [(number, at_s, tensors["text_output"].tolist()) for number, at_s, tensors in loop.messages()]
    assert answering.seen == [f"p{number}" for number in range(9)]
    assert loop.finished == len(loop.sent_s) == 9
    for number in range(9):
        own = [(at_s, text) for found, at_s, text in came if found == number]
        assert [text for _, text in own] == [[f"p{number}".encode()]] * 2
        assert loop.sent_s[number] < own[0][0] <= own[1][0]


def test_no_more_than_the_number_in_flight_are_sent_before_one_ends(url: str, answering: Answering) -> None:
    answering.may_answer.clear()
    with ClosedLoop(url, request, 2) as loop:
        next(seconds for seconds in loop.ticks() if answering.seen and seconds > 0.2)
        assert (len(loop.sent_s), loop.finished) == (2, 0)
        answering.may_answer.set()
        next(seconds for seconds in loop.ticks() if loop.over or seconds > 10)
    assert loop.finished == 9


def test_an_answered_error_and_a_server_that_is_not_there_are_reported(url: str) -> None:
    with (
        ClosedLoop(url, in_turn(MODEL, ["refused"], 4), 1) as loop,
        pytest.raises(LoadError, match=rf"^load on {url}: no room$"),
    ):
        next(seconds for seconds in loop.ticks() if seconds > 10)
    with (
        ClosedLoop("127.0.0.1:9", in_turn(MODEL, ["a"], 4), 1) as loop,
        pytest.raises(LoadError, match=r"load on 127\.0\.0\.1:9: UNAVAILABLE: "),
    ):
        next(seconds for seconds in loop.ticks() if seconds > 10)


def test_requests_that_hang_are_reported_while_the_load_runs_and_at_its_end(
    url: str, answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load, "HANG_S", 0.3)
    answering.may_answer.clear()
    says = rf"^load on {url}: 2 requests hang: nothing came of them for 0\.3 s$"
    with pytest.raises(LoadError, match=says), ClosedLoop(url, request, 2) as loop:
        next(seconds for seconds in loop.ticks() if seconds > 10)
    with pytest.raises(LoadError, match=says), ClosedLoop(url, request, 2) as loop:
        next(loop.ticks())
    answering.may_answer.set()


def test_stages_double() -> None:
    assert [stages(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.parametrize("text", ["", "\n", "[1]", "{}", "no json"])
def test_a_bad_prompt_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(CommandError, match=r"prompts\.jsonl"):
        read_prompts(path)
    path.write_text(f'{{"prompt": "Hi"}}\n\n{text}\n')
    if text.strip():
        with pytest.raises(CommandError, match=r"prompts\.jsonl:3: expected an object with prompt"):
            read_prompts(path)
    else:
        assert read_prompts(path) == ["Hi"]
    with pytest.raises(CommandError, match=r"nowhere\.jsonl: No such file or directory; give JSON lines with prompt"):
        read_prompts(tmp_path / "nowhere.jsonl")
