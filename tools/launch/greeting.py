"""The first response of a server that has become ready, and how to call it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request

from rich.console import Console

from tokenrouter.direct_http import http_open
from tools.errors import complain
from tools.openai_server import OpenAiServer
from tools.tritonserver.server import TritonServer

ENTRY = "tokenrouter"
DEMO_PROMPT = "Start 91: -38, *2, -47 ="
# Of the first response and of the calls that are shown: the first that fits the models' contexts.
_MAX_TOKENS = (160, 40, 10, 1)


def greet(console: Console, server: TritonServer, front: OpenAiServer | None, prompt: str) -> bool:
    """Prints a response and how to get one. Returns whether there was one; a refused prompt is told, and no fault.

    Raises:
        OSError, ValueError, KeyError: the server failed to answer.
    """
    try:
        max_tokens, answer = first_response(partial(_generate, server), prompt)
    except Refused as exc:
        # The server is well, and other prompts may fit.
        complain(f"the first response was refused: {exc}; give another --prompt")
        _print_usage(console, server, front, prompt, _MAX_TOKENS[-1])
        return False
    _print_usage(console, server, front, prompt, max_tokens)
    _print_response(console, prompt, answer)
    return True


def _print_usage(
    console: Console, server: TritonServer, front: OpenAiServer | None, prompt: str, max_tokens: int
) -> None:
    url = f"{server.http_url}/v2/models/{ENTRY}"
    fields = {"text_input": prompt, "max_tokens": max_tokens}
    binaries = Path(sys.executable).parent
    if binaries.is_relative_to(Path.cwd()):
        binaries = binaries.relative_to(Path.cwd())
    console.print("\nCall it:", style="bold")
    for line in (
        f"curl -s {url}/generate -d '{json.dumps(fields)}'",
        f"curl -sN {url}/generate_stream -d '{json.dumps({**fields, 'stream': True})}'",
        f'{binaries}/tokenrouter generate "{prompt}" --stream --url {server.grpc_url}',
        *_python_call(server.grpc_url, prompt, max_tokens),
        *([] if front is None else _openai_call(front.url, prompt)),
    ):
        console.print(f"  {line}", markup=False)
    console.print()


def _python_call(grpc_url: str, prompt: str, max_tokens: int) -> list[str]:
    return [
        "Python over gRPC:",
        "  from tokenrouter.client import stream",
        f"  for chunk in stream({grpc_url!r}, {prompt!r}, max_tokens={max_tokens}):",
        '      print(chunk.text, end="", flush=True)',
    ]


def _openai_call(url: str, prompt: str) -> list[str]:
    body = {"model": ENTRY, "messages": [{"role": "user", "content": prompt}], "temperature": 0}
    return [
        "OpenAI clients:",
        f"  curl -s {url}/chat/completions -H 'Content-Type: application/json' -d '{json.dumps(body)}'",
    ]


def first_response(generate: Callable[[dict[str, Any]], dict[str, Any]], prompt: str) -> tuple[int, dict[str, Any]]:
    """As many tokens as fit, and the answer. Raises what the last `generate` raises."""
    for max_tokens in _MAX_TOKENS:
        fields = {"text_input": prompt, "max_tokens": max_tokens}
        try:
            return max_tokens, generate({**fields, "exclude_input_in_output": True, "return_routing": True})
        except Refused as exc:
            refused = exc
    raise refused


def _print_response(console: Console, prompt: str, answer: dict[str, Any]) -> None:
    routing = json.loads(answer["routing"])
    console.print("A routed response:", style="bold")
    console.print(f"{prompt}{answer['text_output']}", markup=False)
    written = ", ".join(f"{model} wrote {count} tokens" for model, count in routing["tokens"].items())
    console.print(f"({written}, {routing['handoffs']} hand-offs, finish reason {answer['finish_reason']})", style="dim")


class Refused(ValueError):
    """The server answered that it cannot serve this request."""


def _generate(server: TritonServer, fields: dict[str, Any]) -> dict[str, Any]:
    url = f"{server.http_url}/v2/models/{ENTRY}/generate"
    request = Request(url, json.dumps(fields).encode(), {"Content-Type": "application/json"})
    try:
        with http_open(request, timeout=60) as response:
            answer: dict[str, Any] = json.load(response)
    except HTTPError as exc:
        kind = Refused if exc.code == HTTPStatus.BAD_REQUEST else ValueError
        raise kind(exc.read().decode("utf-8", "replace")) from exc
    return answer
