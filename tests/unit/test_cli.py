"""`tokenrouter generate` on the offline engine, and how it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import run
from tests.support.repositories import emulated_spec, write_emulated
from tokenrouter import __version__
from tokenrouter.cli import app


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_emulated(tmp_path_factory.mktemp("cli"), emulated_spec())


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_a_response_and_who_wrote_how_much(repository: Path, stream: list[str]) -> None:
    result = run(app, "generate", "abcdefgh", "--offline", repository, "--max-tokens", 6, "--seed", 5, *stream)
    assert result.exit_code == 0, result.output
    text, _, summary = result.stdout.strip().rpartition("\n")
    assert text.strip() == "abcdef"
    assert summary.startswith("small 3 tokens, large 3 tokens, 5 hand-offs, ")
    assert summary.endswith(", emulated engine (policy scripted, seed 5)")


def test_bad_input_is_one_line_and_exit_code_2(repository: Path, tmp_path: Path) -> None:
    for options in (
        ["--offline", repository, "--policy", "no_such"],
        ["--offline", tmp_path],
        ["--url", "127.0.0.1:9"],
    ):
        result = run(app, "generate", "abc", *options)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith("error: ")


def test_version() -> None:
    result = run(app, "--version")
    assert (result.exit_code, result.stdout) == (0, f"tokenrouter {__version__}\n")
