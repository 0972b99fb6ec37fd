"""The examples of the README and of docs/calling.md print what these pages say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tools.openai_server import OpenAiServer
from tools.tritonserver.server import TritonServer

ROOT = Path(__file__).resolve().parents[2]
PAGES = [(ROOT / name).read_text("utf-8") for name in ("README.md", "docs/calling.md")]

pytestmark = pytest.mark.integration


@dataclass(frozen=True)
class Example:
    """A command or a Python program, and what it prints."""

    kind: str
    code: str
    output: str


def examples(text: str) -> list[Example]:
    """`console` blocks with one command each, and `python` blocks that a `text` block follows."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    found = []
    for (kind, body), (next_kind, next_body) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if kind == "console":
            command, _, output = body.removeprefix("$ ").partition("\n")
            found.append(Example(kind, command, output))
        elif kind == "python" and next_kind == "text":
            found.append(Example(kind, body, next_body))
    return found


EXAMPLES = list(dict.fromkeys(example for page in PAGES for example in examples(page)))


@pytest.fixture(scope="module")
def server() -> Iterator[TritonServer]:
    with TritonServer(ROOT / "model_repository") as running:
        yield running


@pytest.fixture(scope="module")
def ports(server: TritonServer) -> Iterator[dict[str, int]]:
    """Where the ports of the pages are here."""
    with OpenAiServer(server, ROOT / "model_repository") as openai:
        openai.wait()
        used = server.ports
        yield {"8000": used.http, "8001": used.grpc, "8002": used.metrics, "9000": openai.port}


def _comparable(output: str) -> str:
    """Without what differs from run to run: speeds, times, seeds, how a stream is cut, white space at line ends."""
    if output.startswith("data: "):
        return _joined(output)
    output = re.sub(r"[\d.]+ tokens/s", "N tokens/s", output)
    output = re.sub(r"first token \d+ ms", "first token N ms", output)
    output = re.sub(r"seed\W+\d+", "seed N", output)
    return "\n".join(line.rstrip() for line in output.strip().splitlines())


def _joined(stream: str) -> str:
    """Text, number of tokens and end of a stream; tokens that wait to be sent travel in one event."""
    events = [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line]
    ids = [event["output_ids"] for event in events]
    count = sum(len(some) if isinstance(some, list) else 1 for some in ids)
    return f"{''.join(event['text_output'] for event in events)!r} {count} {events[-1]['finish_reason']}"


def _run(example: Example, ports: dict[str, int]) -> str:
    code = re.sub(r"127\.0\.0\.1:(800[012]|9000)", lambda match: f"127.0.0.1:{ports[match[1]]}", example.code)
    if ".venv/bin/tokenrouter generate" in code and "--offline" not in code:
        code += f" --url 127.0.0.1:{ports['8001']}"
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    arguments = ["bash", "-c", code] if example.kind == "console" else [sys.executable, "-c", code]
    done = subprocess.run(arguments, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_there_are_examples_of_every_way_to_call_the_server() -> None:
    code = "\n".join(example.code for example in EXAMPLES)
    for way in (
        "/generate ",
        "/generate_stream",
        "tritonclient.grpc",
        "tokenrouter generate",
        "from_repository",
        "OpenAI(",
    ):
        assert way in code


@pytest.mark.parametrize("example", EXAMPLES, ids=[example.code.splitlines()[0][:60] for example in EXAMPLES])
def test_an_example_prints_what_its_page_says(example: Example, ports: dict[str, int]) -> None:
    assert _comparable(_run(example, ports)) == _comparable(example.output)
