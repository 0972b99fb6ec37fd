"""The OpenAI-compatible server in front of a real tritonserver, called with the official client."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from tokenizers import Tokenizer

from tests.support.openai_server import served
from tests.support.waiting import wait_idle
from tools.openai_server import OpenAiServer
from tools.tritonserver.server import TritonServer

pytestmark = pytest.mark.integration

# Emulated models write the prompt, byte by byte.
PROMPT = "Grüße 🙂"
MESSAGES: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
RENDERED = "system:be brief;user:hi;"
LIMIT = 64


@pytest.fixture(scope="module")
def url(shared: TritonServer, shared_repository: Path) -> Iterator[str]:
    with served(shared_repository, shared.grpc_url, metrics_url=shared.metrics_url) as base:
        yield base


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_models_are_the_entry_its_policies_and_the_llms(client: OpenAI) -> None:
    names = [model.id for model in client.models.list()]
    assert names[0] == "tokenrouter"
    assert {"tokenrouter:r2r", "tokenrouter:rstitch", "small", "large"} <= set(names)
    assert client.models.retrieve("tokenrouter:r2r").id == "tokenrouter:r2r"
    with pytest.raises(openai.NotFoundError, match="nothing"):
        client.models.retrieve("nothing")


def test_a_completion(client: OpenAI) -> None:
    done = client.completions.create(model="tokenrouter", prompt=PROMPT, max_tokens=LIMIT, temperature=0)
    [choice] = done.choices
    assert (choice.text, choice.finish_reason, choice.logprobs) == (PROMPT, "stop", None)
    count = len(PROMPT.encode())
    assert done.usage is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (count, count + 1)


@pytest.mark.parametrize("model", ["tokenrouter", "tokenrouter:random", "small", "large"])
def test_streamed_text_is_the_whole_text(client: OpenAI, model: str) -> None:
    fields: dict[str, Any] = {"model": model, "prompt": PROMPT, "max_tokens": 9, "temperature": 0}
    chunks = list(client.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    *texts, last, usage = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == client.completions.create(**fields).choices[0].text
    assert [chunk.choices[0].finish_reason for chunk in texts] == [None] * len(texts)
    assert last.choices[0].finish_reason == "length"
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == 9


def test_chunks_do_not_depend_on_timing(client: OpenAI) -> None:
    """While others make responses late, Triton merges tokens; the client's chunks stay one per character."""

    def chunks() -> list[str]:
        stream = client.completions.create(
            model="tokenrouter", prompt=PROMPT, max_tokens=LIMIT, temperature=0, stream=True
        )
        return [chunk.choices[0].text for chunk in stream]

    threads = [threading.Thread(target=chunks) for _ in range(12)]
    for thread in threads:
        thread.start()
    busy = chunks()
    for thread in threads:
        thread.join()
    assert busy == chunks() == [*PROMPT, "", ""]


def test_several_prompts_and_forms(client: OpenAI, shared_repository: Path) -> None:
    done = client.completions.create(model="tokenrouter", prompt=["ab", "xyz"], max_tokens=LIMIT, temperature=0)
    assert [(choice.index, choice.text) for choice in done.choices] == [(0, "ab"), (1, "xyz")]
    ids = Tokenizer.from_file(str(shared_repository / "small" / "1" / "tokenizer.json")).encode("ab").ids
    done = client.completions.create(model="small", prompt=[ids, ids], max_tokens=1, temperature=0, echo=True)
    assert [choice.text for choice in done.choices] == ["aba", "aba"]


def test_echo_stop_and_log_probabilities(client: OpenAI) -> None:
    done = client.completions.create(
        model="small", prompt="abcdef", max_tokens=LIMIT, temperature=0, echo=True, stop=["de"], logprobs=1
    )
    [choice] = done.choices
    assert (choice.text, choice.finish_reason) == ("abcdefabc", "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.text_offset is not None
    assert choice.logprobs.text_offset[0] == len("abcdef")
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.token_logprobs is not None
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs) >= 3
    assert all(value <= 0 for value in choice.logprobs.token_logprobs if value is not None)


def test_a_response_that_no_token_ends(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "small", "prompt": "ab", "max_tokens": 12, "temperature": 0}
    assert client.completions.create(**fields).choices[0].finish_reason == "stop"
    on = client.completions.create(**fields, extra_body={"ignore_eos": True})
    assert (on.choices[0].finish_reason, on.usage and on.usage.completion_tokens) == ("length", 12)
    least = client.completions.create(**fields, extra_body={"min_tokens": 9})
    assert least.usage is not None
    assert 9 <= least.usage.completion_tokens <= 12


def test_a_chat(client: OpenAI) -> None:
    fields: dict[str, Any] = {"model": "tokenrouter", "messages": MESSAGES, "temperature": 0}
    done = client.chat.completions.create(**fields, logprobs=True)
    [choice] = done.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", RENDERED, "stop")
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    assert len(choice.logprobs.content) == len(RENDERED) + 1
    first, *rest = list(client.chat.completions.create(**fields, stream=True))
    assert first.choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == RENDERED
    assert [chunk.choices[0].finish_reason for chunk in rest] == [None] * (len(rest) - 1) + ["stop"]


def test_max_completion_tokens_wins_and_content_may_come_in_parts(client: OpenAI) -> None:
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    done = client.chat.completions.create(
        model="tokenrouter", messages=parts, temperature=0, max_tokens=1, max_completion_tokens=7
    )
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == ("user:ab", "length")
    parts[0]["content"][0] = {"type": "image_url", "image_url": {"url": "x"}}
    with pytest.raises(openai.BadRequestError, match="only text"):
        client.chat.completions.create(model="tokenrouter", messages=parts)


def test_writers_and_policy(client: OpenAI) -> None:
    done = client.completions.create(
        model="tokenrouter",
        prompt="abcdefgh",
        max_tokens=8,
        temperature=0,
        seed=-1,
        extra_body={"policy": "random", "policy_params": {"p": 1.0}, "return_routing": True},
    )
    routing = done.choices[0].to_dict()["routing"]
    assert isinstance(routing, dict)
    assert len(routing["writers"]) == 8
    assert routing["policy"] == "random"
    assert routing["seed"] == 2**64 - 1
    assert routing["tokens"] == {name: routing["writers"].count(name) for name in ("small", "large")}
    named = client.completions.create(
        model="tokenrouter:random", prompt="a", max_tokens=1, extra_body={"explain": True}
    )
    explained: Any = named.choices[0].to_dict()["routing"]
    assert explained["policy"] == "random"
    assert explained["decisions"][1]["measures"][0]["name"] == "u"


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"model": "nothing"}, openai.NotFoundError, "model"),
        ({"n": 2}, openai.BadRequestError, "n"),
        ({"temperature": 3}, openai.UnprocessableEntityError, "temperature"),
        ({"max_tokens": 2**31 - 1}, openai.BadRequestError, None),
        ({"prompt": ""}, openai.BadRequestError, "prompt"),
        ({"prompt": [99_999]}, openai.BadRequestError, None),
        ({"extra_body": {"policy": "nothing"}}, openai.BadRequestError, None),
        ({"extra_body": {"policy": "random", "policy_params": {"x": 1}}}, openai.BadRequestError, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_by_exception_class(
    client: OpenAI, fields: dict[str, Any], error: type[openai.APIStatusError], param: str | None, stream: bool
) -> None:
    with pytest.raises(error) as raised:
        client.completions.create(**{"model": "tokenrouter", "prompt": "a", **fields, "stream": stream})
    assert raised.value.param == param


def test_refusals_end_streams_without_a_race_inside_triton(shared: TritonServer, client: OpenAI) -> None:
    """The line is Triton's own sign of it; some 2,300 of them ended tritonserver."""
    before = shared.log_text().count("HandleCancellation called")
    for _ in range(20):
        with pytest.raises(openai.BadRequestError, match="policy is 'nope'; this deployment offers"):
            client.completions.create(model="tokenrouter", prompt=PROMPT, extra_body={"policy": "nope"})
    assert shared.log_text().count("HandleCancellation called") == before


def test_a_full_queue_and_an_expired_request(shared: TritonServer, shared_repository: Path) -> None:
    async def flood(base: str, count: int) -> list[object]:
        async with AsyncOpenAI(base_url=f"{base}/v1", api_key="unused", max_retries=0) as many:
            model = (await many.models.list()).data[0].id
            calls = [
                many.completions.create(model=model, prompt="a" * 400, max_tokens=900, temperature=0)
                for _ in range(count)
            ]
            return await asyncio.gather(*calls, return_exceptions=True)

    with served(shared_repository, shared.grpc_url, "narrow") as base:
        outcomes = asyncio.run(flood(base, 8))
    assert sum(isinstance(outcome, openai.RateLimitError) for outcome in outcomes) == 3
    with served(shared_repository, shared.grpc_url, "reject") as base:
        outcomes = asyncio.run(flood(base, 4))
    statuses = {outcome.status_code for outcome in outcomes if isinstance(outcome, openai.APIStatusError)}
    assert statuses == {504}


def test_a_client_that_leaves_cancels_its_request(shared: TritonServer, client: OpenAI, url: str) -> None:
    wait_idle(shared)
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.5).completions.create(
            model="tokenrouter", prompt="a" * 20_000, max_tokens=20_000, temperature=0
        )
    wait_idle(shared)
    stream = client.completions.create(
        model="tokenrouter", prompt="a" * 20_000, max_tokens=20_000, temperature=0, stream=True
    )
    next(iter(stream))
    stream.close()
    wait_idle(shared)


def test_health_and_metrics(url: str, shared_repository: Path) -> None:
    import httpx2

    with httpx2.Client(trust_env=False) as http:
        assert http.get(f"{url}/health/ready").status_code == 200
        assert "tokenrouter_in_flight" in http.get(f"{url}/metrics").text
    with served(shared_repository, "127.0.0.1:1") as base, httpx2.Client(trust_env=False) as http:
        assert http.get(f"{base}/health/ready").status_code == 503
        away = http.post(f"{base}/v1/completions", json={"model": "tokenrouter", "prompt": "a"})
        assert (away.status_code, away.json()["error"]["type"]) == (503, "service_unavailable_error")


def test_key_and_body_limit(shared: TritonServer, shared_repository: Path) -> None:
    with served(shared_repository, shared.grpc_url, api_key="secret", max_body_bytes=2000) as base:
        with pytest.raises(openai.AuthenticationError):
            OpenAI(base_url=f"{base}/v1", api_key="wrong", max_retries=0).models.list()
        with OpenAI(base_url=f"{base}/v1", api_key="secret", max_retries=0) as good:
            assert good.models.list().data
            with pytest.raises(openai.APIStatusError) as raised:
                good.completions.create(model="tokenrouter", prompt="a" * 3000)
            assert raised.value.status_code == 413


def test_a_prompt_over_the_limit_is_refused_before_it_is_read(client: OpenAI) -> None:
    """Reading it would take seconds, in which nobody else is served."""
    text = "x" * 2_000_000
    with pytest.raises(
        openai.BadRequestError, match=r"prompt has 2000000 bytes; this deployment takes at most 1048576"
    ):
        client.completions.create(model="tokenrouter", prompt=text)
    with pytest.raises(openai.BadRequestError, match="messages has 2000000 bytes"):
        client.chat.completions.create(model="tokenrouter", messages=[{"role": "user", "content": text}])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_tls_by_files(
    shared: TritonServer, shared_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    new = ["-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert)]
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(["openssl", "req", *new, *subject], check=True, capture_output=True)
    monkeypatch.setenv("TOKENROUTER_TLS_CERT", str(cert))
    monkeypatch.setenv("TOKENROUTER_TLS_KEY", str(key))
    with OpenAiServer(shared, shared_repository) as server:
        server.wait()
        assert server.url.startswith("https://")
        trusting = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=str(cert)), trust_env=False)
        with OpenAI(base_url=server.url, api_key="unused", http_client=trusting) as client:
            assert client.models.list().data[0].id == "tokenrouter"
    monkeypatch.setenv("TOKENROUTER_TLS_KEY", str(tmp_path / "none"))
    command = [sys.executable, "-m", "tokenrouter.openai_api", "--model-repository", str(shared_repository)]
    refused = subprocess.run([*command, "--entry", "tokenrouter"], capture_output=True, text=True)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert refused.stderr.startswith(f"error: --tls-cert {cert}, --tls-key {tmp_path / 'none'}")


def test_malformed_bodies(url: str) -> None:
    import httpx2

    with httpx2.Client(trust_env=False) as http:
        for body in (b"", b"{", b"[]", b'{"model": "tokenrouter"}', b'{"model": 1, "prompt": {}}', b"\xff\xfe"):
            answer = http.post(f"{url}/v1/completions", content=body, headers={"content-type": "application/json"})
            assert answer.status_code in (400, 422), body
            assert set(json.loads(answer.content)["error"]) == {"message", "type", "param", "code"}


def test_what_the_description_allows_is_answered_as_it_says(url: str, tmp_path: Path) -> None:
    """Schemathesis over the server's own description: no 5xx, no status and no body outside it."""
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    bounds = ["--phases", "examples,coverage,fuzzing", "--max-examples", "60", "--seed", "1", "--request-timeout", "20"]
    ran = subprocess.run(
        [Path(sys.executable).with_name("schemathesis"), "run", f"{url}/openapi.json", "--checks", checks, *bounds],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={"PATH": "", "HOME": str(tmp_path), "NO_PROXY": "*"},
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout[-8000:] + ran.stderr
