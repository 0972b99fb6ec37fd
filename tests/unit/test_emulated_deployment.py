"""What is written for a profile: step times, thresholds, and a policy that routes like it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from perf.emulated.deployment import EmulatedDeployment, Thresholds
from perf.emulated.repository import VOCAB_SIZE, byte_tokenizer
from perf.emulated.routing import routed
from tokenrouter.repository import Repository
from tokenrouter.speculation import Speculation
from tools.dtmc.errors import ProfileError
from tools.dtmc.profile import ModelProfile, load_profile

R2R = load_profile(Path(__file__).parents[2] / "configs" / "profiles" / "r2r_qwen3_0.6b_32b.yaml")
TABLE = Thresholds("table", {2: {"large": 2}, 8: {"small": 1, "large": 5}})


def options(folder: Path, model: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((folder / model / "1" / "model.yaml").read_text())
    return found


def parameter(folder: Path, model: str, name: str) -> Any:
    return json.loads(Repository(folder).config(model)["parameters"][name]["string_value"])


def test_a_table_of_thresholds_and_the_matrices_of_the_profile_are_written(tmp_path: Path) -> None:
    EmulatedDeployment(R2R, "markov", 8, TABLE).write(tmp_path)
    assert parameter(tmp_path, "large", "batch_thresholds") == {"2": 2, "8": 5}
    assert parameter(tmp_path, "small", "batch_thresholds") == {"2": 1, "8": 1}
    params = parameter(tmp_path, "tokenrouter", "policy_params")
    assert params["routing"]["small"] == {"small": pytest.approx(0.65), "large": pytest.approx(0.35)}
    assert params["commit"]["small"] == {"small": 1, "large": 0}
    assert options(tmp_path, "large")["step_ms"] == 27.9


def test_engines_are_faster_by_what_comes_on_top(tmp_path: Path) -> None:
    models = {**R2R.models, "large": ModelProfile(step_ms={1: 10.0, 2: 12.0})}
    profile = msgspec.structs.replace(R2R, models=models)
    deployment = EmulatedDeployment(profile, "markov", 3, around_ms={"small": 0.5, "large": 11.0})
    deployment.write(tmp_path)
    assert options(tmp_path, "small")["step_ms"] == 5.5
    assert options(tmp_path, "large")["step_ms"] == {1: 0.0, 2: 1.0, 3: 3.0}


@pytest.mark.parametrize("policy", ["citer", "collm", "me", "r2r", "random", "rstitch"])
def test_every_policy_that_follows_a_profile_gets_what_it_needs(policy: str, tmp_path: Path) -> None:
    EmulatedDeployment(routed(R2R, policy), policy, 4).write(tmp_path)
    routers = [path.stem for path in tmp_path.rglob("*.safetensors")]
    assert routers == ([policy] if policy in ("citer", "collm", "r2r") else [])
    assert ("signals" in options(tmp_path, "small")) == (policy in ("citer", "collm", "r2r", "rstitch"))


@pytest.mark.parametrize("policy", ["markov", "r2r"])
def test_agreement_is_the_large_models_and_speculation_the_entrys(policy: str, tmp_path: Path) -> None:
    profile = routed(R2R, policy)
    EmulatedDeployment(profile, policy, 4, agreement=0.7, speculation=Speculation(6, 0.25)).write(tmp_path)
    agreements = [options(tmp_path, name)["signals"]["agreement"] for name in ("small", "large")]
    assert agreements == [1.0, 0.7]
    assert parameter(tmp_path, "tokenrouter", "speculation") == {"depth": 6, "least_agreement": 0.25}


def test_a_policy_that_cannot_route_like_the_profile_is_refused(tmp_path: Path) -> None:
    halves = msgspec.structs.replace(R2R, commit={"small": {"small": 1.0, "large": 0.5}, "large": {"small": 1.0}})
    for deployment, named in (
        (EmulatedDeployment(R2R, "glimprouter", 4), "glimprouter: does not follow a profile"),
        (EmulatedDeployment(halves, "markov", 4), r"commit\.small\.large: 0\.5"),
    ):
        with pytest.raises(ProfileError, match=named):
            deployment.write(tmp_path)


def test_the_byte_tokenizer_has_the_vocabulary_that_is_written() -> None:
    assert byte_tokenizer().get_vocab_size(with_added_tokens=True) == VOCAB_SIZE
