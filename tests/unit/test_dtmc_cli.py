"""The command line: JSON, plots, exit codes and error messages."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.support import commands
from tests.support.repositories import emulated_spec
from tools.build_repository.build import write_repository
from tools.dtmc.cli import app

PROFILE = str(Path(__file__).parents[2] / "configs" / "profiles" / "r2r_qwen3_0.6b_32b.yaml")


def run(command: str, *options: str, profile: str = PROFILE) -> Result:
    return commands.run(app, command, "--profile", profile, *options)


def read_json(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value


def test_solve_prints_json() -> None:
    value = read_json(run("solve", "--inflight", "4", "--thresholds", "small=1,large=3", "--json"))
    assert value["tokens_per_second"] == pytest.approx(207.95, abs=0.01)
    assert value["states"] == 14
    assert value.keys() >= {"mean_batch", "utilisation", "mean_wait_ms"}
    assert value["mean_batch"].keys() == {"small", "large"}


def test_search_prints_json_and_a_table() -> None:
    value = read_json(run("search", "--inflight", "4", "--table", "--json"))
    assert value["thresholds"] == {"small": 1, "large": 3}
    assert value["eager_tokens_per_second"] == pytest.approx(187.19, abs=0.01)
    assert (value["evaluated"], value["pruned"]) == (10, 0)
    assert [row["inflight"] for row in value["table"]] == [1, 2, 3, 4]
    assert "table" not in read_json(run("search", "--inflight", "2", "--json"))


@pytest.mark.parametrize("options", [["--thresholds", "small=1,large=2"], []], ids=["given", "searched"])
def test_sweep_draws_a_curve_per_model(tmp_path: Path, options: list[str]) -> None:
    image = tmp_path / "sweep.png"
    value = read_json(run("sweep", "--inflight", "3", "--plot", str(image), "--json", *options))
    assert image.read_bytes().startswith(b"\x89PNG")
    assert value["thresholds"] == {"small": 1, "large": 2}
    assert [point["threshold"] for point in value["curves"]["large"]] == [1, 2, 3]
    assert [point["threshold"] for point in value["curves"]["small"]] == [1, 2]


def test_sweep_adds_the_simulator_s_throughput_when_asked(tmp_path: Path) -> None:
    options = ["--inflight", "2", "--plot", str(tmp_path / "a.svg"), "--json"]
    points = read_json(run("sweep", *options, "--simulate"))["curves"]["large"]
    assert [point["threshold"] for point in points] == [1, 2]
    for point in points:
        assert point["simulated_tokens_per_second"] == pytest.approx(point["tokens_per_second"], rel=0.02)
    plain = read_json(run("sweep", *options))["curves"]["large"]
    assert [point["simulated_tokens_per_second"] for point in plain] == [None, None]


def test_apply_checks_writes_and_then_is_up_to_date(tmp_path: Path) -> None:
    write_repository(emulated_spec(), tmp_path)
    text = (tmp_path / "large" / "config.pbtxt").read_text()
    options = ["--model-repository", str(tmp_path), "--inflight", "4"]
    before = run("apply", *options, "--check")
    assert before.exit_code == 1
    assert "+  preferred_batch_size: [ 3 ]" in before.stdout
    assert (tmp_path / "large" / "config.pbtxt").read_text() == text
    value = read_json(run("apply", *options, "--json"))
    assert value["fields"]["large"]["by_in_flight"] == {"1": 1, "2": 2, "3": 2, "4": 3}
    assert value["models"]["large"]["changed"]
    assert value["deployment"]["changed"]
    assert run("apply", *options, "--check").exit_code == 0


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("solve", ["--inflight", "4", "--thresholds", "small=1"], "large is missing; give one per model"),
        ("solve", ["--inflight", "4", "--thresholds", "small=1,large=1,tiny=1"], "no model 'tiny'; the models are"),
        ("solve", ["--inflight", "4", "--thresholds", "small=3,large=3"], "can deadlock with 4 in flight; lower them"),
        ("solve", ["--inflight", "4", "--thresholds", "small=0,large=3"], "small=0; give 1..4"),
        ("solve", ["--inflight", "4", "--thresholds", "small:1"], "'small:1' is not MODEL=NUMBER"),
        ("solve", ["--inflight", "4", "--thresholds", "small=1,small=2"], "small is given twice"),
        ("search", ["--inflight", "4", "--max-mean-tpot-ms", "19"], "lower --inflight"),
        ("sweep", ["--inflight", "2", "--plot", "/dev/null/a.png"], "--plot /dev/null/a.png"),
        ("sweep", ["--inflight", "2", "--plot", "a.what"], "--plot a.what"),
        ("apply", ["--inflight", "2", "--model-repository", "/nowhere"], "/nowhere/built_deployment.yaml is missing"),
    ],
)
def test_errors_name_the_remedy_and_exit_with_2(command: str, options: list[str], message: str) -> None:
    result = run(command, *options)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_a_missing_profile_exits_with_2() -> None:
    result = run("search", "--inflight", "2", profile="nowhere.yaml")
    assert result.exit_code == 2
    assert re.search("error: nowhere.yaml: No such file", result.stderr)


@pytest.mark.parametrize("options", [["solve", "--thresholds", "small=1,large=2"], ["search", "--table"]])
def test_without_json_a_table_is_printed(options: list[str]) -> None:
    result = run(*options, "--inflight", "3")
    assert result.exit_code == 0, result.output
    assert "tokens/s" in result.stdout
