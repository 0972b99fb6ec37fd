"""Every endpoint, every model, every value of `stream`: what a client gets, message by message."""

from __future__ import annotations

import json
import math
from typing import Any

import grpc
import pytest
import tritonclient.grpc as grpcclient
from typer.testing import CliRunner

from tests.support.grpc_calls import GrpcStream, grpc_stream, unary
from tests.support.http_calls import answer, generate, refusal, stream
from tests.support.repositories import END_ID
from tests.support.waiting import until, wait_idle
from tokenrouter.cli import app as cli
from tokenrouter.client import infer_input
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

ROUTED = ("tokenrouter", "ensemble")
MODELS = (*ROUTED, "small", "large")
PROMPT = "Grüße 🙂"
PROMPT_BYTES = list(PROMPT.encode())
FLAGS = {"return_num_input_tokens": True, "return_num_output_tokens": True}


def flag(value: bool | None) -> dict[str, bool]:
    return {} if value is None else {"stream": value}


def joined(events: list[dict[str, Any]]) -> str:
    return "".join(event["text_output"] for event in events)


def ids(events: list[dict[str, Any]]) -> list[int]:
    return [token for event in events for token in as_list(event["output_ids"])]


def as_list(value: Any) -> list[Any]:
    """Triton writes tensors of one element as scalars."""
    return value if isinstance(value, list) else [value]


@pytest.fixture(scope="module")
def prompt_ids(shared: TritonServer) -> list[int]:
    """Token ids of the prompt, and of the answer up to its end token."""
    reply = answer(shared, text_input=PROMPT, max_tokens=99)
    assert len(reply["output_ids"]) == len(PROMPT_BYTES) + 1
    return list(reply["output_ids"][:-1])


@pytest.mark.parametrize("wants_stream", [False, None])
@pytest.mark.parametrize("model", MODELS)
def test_generate_gives_one_answer(
    shared: TritonServer, prompt_ids: list[int], model: str, wants_stream: bool | None
) -> None:
    reply = answer(shared, model, text_input=PROMPT, max_tokens=99, **flag(wants_stream), **FLAGS)
    assert reply["text_output"] == PROMPT + PROMPT
    assert reply["output_ids"] == [*prompt_ids, END_ID]
    assert reply["finish_reason"] == "stop"
    assert reply["num_input_tokens"] == len(PROMPT_BYTES)
    assert reply["num_output_tokens"] == len(PROMPT_BYTES) + 1
    assert (reply["batch_index"], reply["sequence_index"]) == (0, 0)


@pytest.mark.parametrize("model", MODELS)
def test_generate_with_stream_says_which_endpoint_streams(shared: TritonServer, model: str) -> None:
    """Triton's own HTTP front end refuses a second response; it has sent status 200 by then."""
    _, reply = generate(shared, {"text_input": PROMPT, "max_tokens": 99, "stream": True}, model=model)
    assert "use generate stream" in reply["error"]
    wait_idle(shared)


@pytest.mark.parametrize("model", MODELS)
def test_generate_stream_streams_deltas(shared: TritonServer, prompt_ids: list[int], model: str) -> None:
    events = stream(shared, model, text_input=PROMPT, max_tokens=99, **FLAGS)
    assert len(events) > 2
    assert joined(events) == PROMPT
    assert not any("\ufffd" in event["text_output"] for event in events)
    assert ids(events) == [*prompt_ids, END_ID]
    assert ["finish_reason" in event for event in events] == [False] * (len(events) - 1) + [True]
    assert sum(event["num_output_tokens"] for event in events) == len(PROMPT_BYTES) + 1
    assert {event["num_input_tokens"] for event in events} == {len(PROMPT_BYTES)}


@pytest.mark.parametrize("wants_stream", [False, None])
@pytest.mark.parametrize("model", MODELS)
def test_generate_stream_without_stream_is_one_event(
    shared: TritonServer, model: str, wants_stream: bool | None
) -> None:
    body = {"text_input": PROMPT, "max_tokens": 99, "stream": wants_stream}
    events = stream(shared, model, **{key: value for key, value in body.items() if value is not None})
    if wants_stream is None:
        status, reply = generate(shared, {"text_input": PROMPT, "max_tokens": 99}, model=model)
        assert (status, reply["text_output"]) == (200, PROMPT + PROMPT)
    else:
        assert joined(events) == PROMPT + PROMPT
        assert len(events) == 1


@pytest.mark.parametrize("wants_stream", [True, False, None])
@pytest.mark.parametrize("model", MODELS)
def test_grpc_stream(shared: TritonServer, prompt_ids: list[int], model: str, wants_stream: bool | None) -> None:
    with GrpcStream(shared) as call:
        call.send({"text_input": PROMPT, "max_tokens": 99, **flag(wants_stream)}, model=model, request_id="r")
        messages = call.wait("r")
    assert [message.final for message in messages] == [False] * (len(messages) - 1) + [True]
    # As with NVIDIA's models: the ensemble's FINAL flag stands with the last tensors, the others' comes by itself.
    data = messages if model == "ensemble" else messages[:-1]
    assert bool(messages[-1].tensors) == (model == "ensemble")
    assert not any(message.error for message in messages)
    assert len(data) > 2 if wants_stream else len(data) == 1
    assert "".join(message.text for message in data) == (PROMPT if wants_stream else PROMPT + PROMPT)
    assert [token for message in data for token in message.ids] == [*prompt_ids, END_ID]
    assert {message.tensors["text_output"].shape for message in data} == {(1,)}
    assert [message.finish_reason for message in data] == [""] * (len(data) - 1) + ["stop"]
    for name in ("batch_index", "sequence_index"):
        assert data[-1].tensors[name].shape == (1, 1)


@pytest.mark.parametrize("model", MODELS)
def test_unary_grpc_names_the_streaming_call(shared: TritonServer, model: str) -> None:
    code, details = unary(shared, {"text_input": PROMPT, "max_tokens": 3}, model=model)
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert "decoupled" in details


@pytest.mark.parametrize("wants_stream", [True, False])
@pytest.mark.parametrize("model", ROUTED)
def test_routing_adds_up(shared: TritonServer, model: str, wants_stream: bool) -> None:
    params = json.dumps({"writers": ["small", "small", "large"]})
    messages = grpc_stream(
        shared,
        {
            "text_input": "x" * 30,
            "max_tokens": 30,
            "stream": wants_stream,
            "return_routing": True,
            "policy": "scripted",
            "policy_params": params,
            "seed": 7,
        },
        model=model,
    )
    data = [message for message in messages if message.tensors]
    runs = [run for message in data for run in message.routing["runs"]]
    writers = [run["model"] for run in runs for _ in range(run["start"], run["end"])]
    assert writers == ["small", "small", "large"] * 10
    assert [run["start"] for run in runs] == [0, *(run["end"] for run in runs[:-1])]
    assert runs[-1]["end"] == 30
    for message in data:
        covered = sum(run["end"] - run["start"] for run in message.routing["runs"])
        assert covered == len(message.ids)
    total = data[-1].routing
    assert total["tokens"] == {"small": 20, "large": 10}
    assert total["handoffs"] == 19
    assert (total["policy"], total["seed"]) == ("scripted", 7)
    assert not any("tokens" in message.routing for message in data[:-1])


@pytest.mark.parametrize("speculation", [False, True])
def test_a_response_explains_itself(shared: TritonServer, speculation: bool) -> None:
    body = {"text_input": "x" * 20, "max_tokens": 20, "policy": "random", "policy_params": '{"p": 0.4}', "seed": 3}
    routing = json.loads(answer(shared, **body, explain=True, speculation=speculation)["routing"])
    entry, *decisions = routing["decisions"]
    assert (entry["why"], entry["target"]) == ("entry", "small")
    kept = [each for each in decisions if each["kept"]]
    writers = [run["model"] for run in routing["runs"] for _ in range(run["start"], run["end"])]
    assert [each["model"] for each in kept] == writers
    assert "".join(each["text"] for each in kept) == "x" * 20
    draws = [each for each in decisions if each["model"] == "small"]
    assert all((each["measures"][0]["value"] < 0.4) == (each["target"] == "large") for each in draws)
    assert "decisions" not in json.loads(answer(shared, **body, return_routing=True)["routing"])
    assert "unknown field 'explain'" in refusal(shared, "small", text_input="x", max_tokens=1, explain=True)[1]


@pytest.mark.parametrize("wants_stream", [True, False])
@pytest.mark.parametrize("model", MODELS)
def test_perf_metrics_are_in_order(shared: TritonServer, model: str, wants_stream: bool) -> None:
    messages = grpc_stream(
        shared,
        {"text_input": "x" * 20, "max_tokens": 20, "stream": wants_stream, "return_perf_metrics": True},
        model=model,
    )
    last = [message for message in messages if message.tensors][-1].tensors
    names = ("arrival_time_ns", "first_scheduled_time_ns", "first_token_time_ns", "last_token_time_ns")
    times = [int(last[name][0][0]) for name in names]
    assert times == sorted(times)
    assert times[3] > times[2]
    blocks = 3 * (2 if model in ROUTED else 1)
    assert last["kv_cache_alloc_new_blocks"][0][0] == last["kv_cache_alloc_total_blocks"][0][0] == blocks
    assert last["kv_cache_reused_blocks"][0][0] == last["total_draft_tokens"][0][0] == 0


def test_perf_metrics_only_on_request(shared: TritonServer) -> None:
    assert "arrival_time_ns" not in answer(shared, text_input="x", max_tokens=1)


def test_models_load_in_the_order_of_load_after(shared: TritonServer) -> None:
    """`small` names `large` there; Triton starts both at once."""
    log = shared.log_text()
    large, small = (log.index(f"{name}: EngineInfo(") for name in ("large", "small"))
    assert large < small
    assert "has not begun to load" not in log


@pytest.mark.parametrize("model", MODELS)
def test_log_probs(shared: TritonServer, model: str) -> None:
    body = {"text_input": "x" * 20, "max_tokens": 20, "return_log_probs": True}
    whole = answer(shared, model, **body)["output_log_probs"]
    assert len(whole) == 20
    assert all(value < 0 for value in whole)
    messages = [m for m in grpc_stream(shared, body, model=model) if m.tensors]
    pieces = [message.tensors["output_log_probs"] for message in messages]
    assert {piece.shape[:2] for piece in pieces} == {(1, 1)}
    assert [float(value) for piece in pieces for value in piece[0][0]] == pytest.approx(whole, abs=1e-6)
    assert float(messages[-1].tensors["cum_log_probs"][0][0]) == pytest.approx(math.fsum(whole), abs=1e-4)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("exclude", "expected"), [(True, "hello"), (False, "hellohello")])
def test_exclude_input_in_output(shared: TritonServer, model: str, exclude: bool, expected: str) -> None:
    reply = answer(shared, model, text_input="hello", max_tokens=5, exclude_input_in_output=exclude)
    assert reply["text_output"] == expected
    assert reply["finish_reason"] == "length"
    assert joined(stream(shared, model, text_input="hello", max_tokens=5, exclude_input_in_output=exclude)) == "hello"


def test_token_ids_instead_of_text(shared: TritonServer) -> None:
    reply = answer(shared, input_ids=[65, 66, 67], max_tokens=2, exclude_input_in_output=True)
    assert reply["output_ids"] == [65, 66]


@pytest.mark.parametrize("model", ROUTED)
def test_one_stream_carries_many_requests_and_one_failure(shared: TritonServer, model: str) -> None:
    names = [f"request-{i}" for i in range(8)]
    with GrpcStream(shared) as call:
        for i, name in enumerate(names):
            limit = 0 if i == 3 else 40
            fields = {"text_input": f"{i}" * 60, "max_tokens": limit, "stream": i % 2 == 0}
            call.send(fields, model=model, request_id=name)
        answers = {name: call.wait(name) for name in names}
        # The stream is still good for another one.
        call.send({"text_input": "once more", "max_tokens": 4, "exclude_input_in_output": True}, request_id="again")
        assert call.wait("again")[0].text == "once"
    for i, name in enumerate(names):
        assert sum(message.final for message in answers[name]) == 1
        if i == 3:
            assert [bool(message.error) for message in answers[name]] == [True]
            assert "max_tokens is 0" in answers[name][0].error
        else:
            text = "".join(message.text for message in answers[name])
            assert text == f"{i}" * (40 if i % 2 == 0 else 100)


def test_messages_without_empty_final_response(shared: TritonServer) -> None:
    """A client that does not ask for empty final responses sees data only, and the stream ends when it is done."""
    with GrpcStream(shared) as call:
        call.send({"text_input": "hello", "max_tokens": 5, "stream": True}, empty_final=False)
        call.close()
        assert call.status is grpc.StatusCode.OK
    assert "".join(message.text for message in call.messages) == "hello"
    assert all(message.tensors for message in call.messages)


@pytest.mark.parametrize("model", ROUTED)
@pytest.mark.parametrize("wants_stream", [True, False])
def test_callback_client_of_tritonclient(shared: TritonServer, model: str, wants_stream: bool) -> None:
    """Start, infer, stop without cancel: what TensorRT-LLM's own example clients do."""
    results: list[tuple[Any, Any]] = []
    fields: dict[str, Any] = {
        "text_input": "hello",
        "max_tokens": 5,
        "stream": wants_stream,
        "beam_width": 1,
        "temperature": 0.0,
        "num_return_sequences": 1,
        "stop_words": "",
    }
    inputs = [infer_input(name, value) for name, value in fields.items()]
    with grpcclient.InferenceServerClient(shared.grpc_url) as client:
        client.start_stream(lambda result, error: results.append((result, error)))
        client.async_stream_infer(model, inputs, outputs=[grpcclient.InferRequestedOutput("text_output")])
        client.stop_stream()
    until(lambda: results)
    assert not any(error for _, error in results)
    text = "".join(result.as_numpy("text_output")[0].decode() for result, _ in results)
    assert text == ("hello" if wants_stream else "hellohello")
    # Only what was asked for is sent.
    assert all(result.as_numpy("output_ids") is None for result, _ in results)


def test_top_shows_what_runs(shared: TritonServer) -> None:
    answer(shared, text_input="abc", max_tokens=8)
    shown = CliRunner().invoke(
        cli, ["top", "--metrics-url", shared.metrics_url, "--looks", "1"], env={"COLUMNS": "200"}
    )
    assert shown.exit_code == 0, shown.output
    rows = {line.split()[0] for line in shown.output.splitlines() if line.strip()}
    assert {"entry", "tokenrouter", "model", "small", "large"} <= rows
