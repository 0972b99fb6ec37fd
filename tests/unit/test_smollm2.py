"""What `make serve MODEL=smollm2` refuses; the deployment itself is an integration test."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from tests.support.commands import run
from tools.errors import CommandError
from tools.smollm2 import wheel
from tools.smollm2.__main__ import app

ROOT = Path(__file__).parents[2]


def test_without_the_wheel_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wheel, "PACKAGE", "not_installed_anywhere")
    result = run(app, "build", "--output", tmp_path / "out")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == (
        "error: the weights are not installed: make serve MODEL=smollm2 does, as requirements/smollm2.lock has it\n"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "command",
    [("answers", "--output", "a"), ("train", "--data", "a", "--output", "b.gguf"), ("evaluate", "--data", "a")],
)
def test_before_anything_is_built_the_remedy_is_named(command: tuple[str, ...], tmp_path: Path) -> None:
    result = run(app, *command, "--folder", tmp_path / "none")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is not there; python -m tools.smollm2 build writes it\n" in result.stderr


def test_another_file_is_refused_by_its_checksum(tmp_path: Path) -> None:
    path = tmp_path / "weights.gguf"
    path.write_bytes(b"GGUF")
    found = hashlib.sha256(b"GGUF").hexdigest()
    assert wheel.verified(path, found) == path
    with pytest.raises(CommandError, match=f"weights.gguf has the SHA-256 {found}, not {wheel.SHA256}"):
        wheel.verified(path, wheel.SHA256)


@pytest.mark.parametrize(
    ("model", "shown"),
    [("smollm2", "--model-repository .smollm2/model_repository"), ("", "--model-repository model_repository")],
)
def test_make_serves_the_deployment_of_a_model(model: str, shown: str) -> None:
    assert shown in make("serve", f"MODEL={model}").stdout


def test_make_knows_no_other_model() -> None:
    done = make("serve", "MODEL=gpt5")
    assert done.returncode == 2
    assert "MODEL is gpt5; it may be smollm2, or left out for the arithmetic pair" in done.stderr


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What make would do."""
    return subprocess.run(["make", "--dry-run", *arguments], cwd=ROOT, capture_output=True, text=True)
