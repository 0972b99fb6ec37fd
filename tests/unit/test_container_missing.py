"""What the GPU image may install: only distributions that its base image lacks."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tools.container import missing as module
from tools.container.missing import installed, main, mismatch, missing, normalized


def wheels(folder: Path, *names: str) -> list[Path]:
    paths = [folder / f"{name}-py3-none-any.whl" for name in names]
    for path in paths:
        path.touch()
    return paths


def test_only_what_is_not_there_under_any_spelling(tmp_path: Path) -> None:
    there = wheels(tmp_path, "PyYAML-6.0", "prometheus_client-0.26.0", "ruamel.yaml-0.18")
    lacking = wheels(tmp_path, "msgspec-0.23.0", "tokenrouter-0.1.0")
    present = {"pyyaml": "5.4", "prometheus-client": "0.20", "ruamel-yaml": "0.17", "torch": "2.10.0a0+b4e4"}
    assert missing([*there, *lacking], present) == sorted(lacking)


def test_installed_knows_what_pip_knows() -> None:
    found = installed()
    assert found["msgspec"] == version("msgspec")
    assert all(name == normalized(name) for name in found)


@pytest.mark.parametrize("have", ["1.2.1", "1.2.1.post1", "1.2.1+cu131"])
def test_expected_version_is_there(have: str) -> None:
    assert mismatch("tensorrt_llm==1.2.1", {"tensorrt-llm": have}) is None


@pytest.mark.parametrize("have", ["1.2.10", "1.2.1rc3", "1.2.0", "1.3.0"])
def test_another_version_is_named(have: str) -> None:
    assert mismatch("tensorrt_llm==1.2.1", {"tensorrt-llm": have}) == (
        f"tensorrt_llm 1.2.1 is expected, this image has {have}: choose the image that has it, or expect another"
    )


def test_absent_distribution_is_named() -> None:
    assert "this image has none" in (mismatch("tensorrt_llm==1.2.1", {}) or "")


@pytest.mark.parametrize("text", ["tensorrt_llm", "tensorrt_llm>=1.2", "==1", "tensorrt_llm=="])
def test_expectation_of_another_form(text: str) -> None:
    with pytest.raises(ValueError, match="name==version"):
        mismatch(text, {})


def test_prints_paths_for_pip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wheels(tmp_path, "numpy-1.26.4")
    (lacking,) = wheels(tmp_path, "no_such_distribution-1.0")
    assert main([str(tmp_path), f"numpy=={version('numpy')}"]) == 0
    assert capsys.readouterr().out == f"{lacking}\n"


def test_wrong_base_image_prints_nothing_that_could_be_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheels(tmp_path, "no_such_distribution-1.0")
    assert main([str(tmp_path), "numpy==0.1"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert "numpy 0.1 is expected" in output.err


def test_no_wheels_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 1
    assert "has no wheels" in capsys.readouterr().err


def test_runs_on_the_standard_library_alone(tmp_path: Path) -> None:
    """It runs in the base image before anything of ours is there; -S leaves out site-packages."""
    (lacking,) = wheels(tmp_path, "msgspec-0.23.0")
    command = [sys.executable, "-I", "-S", module.__file__, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"{lacking}\n"
