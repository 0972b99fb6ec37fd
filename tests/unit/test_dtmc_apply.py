"""New thresholds for a built repository: what changes, what is refused, and what a rebuild does with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tests.support.repositories import emulated_spec
from tokenrouter.batcher import Batching
from tokenrouter.errors import ConfigError
from tokenrouter.repository import Repository
from tools.build_repository.build import BUILT, built_deployment, repository_files, write_repository
from tools.build_repository.spec import BatchingSpec, DeploymentSpec
from tools.build_repository.thresholds import batching_of, max_queue_delay_microseconds
from tools.build_repository.tuning import kept, plan_edits, undone, with_thresholds, write_edits
from tools.dtmc.profile import load_profile
from tools.dtmc.search import search_table

PROFILE = load_profile(Path(__file__).parents[2] / "configs" / "profiles" / "r2r_qwen3_0.6b_32b.yaml")
FOUND = BatchingSpec(3, 67_800, {1: 1, 2: 2, 3: 2, 4: 3})


def config(text: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def build(folder: Path, **fields: Any) -> DeploymentSpec:
    spec = emulated_spec(**fields)
    write_repository(spec, folder)
    return spec


def test_thresholds_of_a_table_are_those_of_every_number_in_flight() -> None:
    found = batching_of(PROFILE, search_table(PROFILE, 4))
    assert found["large"] == FOUND
    assert found["small"] == BatchingSpec(1, 67_800, {1: 1, 2: 1, 3: 1, 4: 1})


def test_the_delay_is_two_rounds_of_steps() -> None:
    assert max_queue_delay_microseconds(PROFILE, 8) == 2 * (6000 + 27900)


def test_the_thresholds_are_set_and_nothing_else(tmp_path: Path) -> None:
    spec = build(tmp_path, model={"direct_kv_share": 0.5})
    write_edits(plan_edits(tmp_path, {"large": FOUND}).values())
    assert Repository(tmp_path).model("large").batching == Batching(3, 67_800_000, FOUND.batch_thresholds)
    changed = []
    for relative, before in repository_files(spec).items():
        after = (tmp_path / relative).read_text()
        if before != after:
            changed.append(relative)
        if relative.endswith("config.pbtxt"):
            old, new = config(before), config(after)
            for message in (old, new):  # what is left must be equal
                message.ClearField("dynamic_batching")
                message.parameters.pop("batch_thresholds", None)
            assert new == old
    assert changed == [BUILT, "large/config.pbtxt"]
    assert built_deployment(tmp_path).tuned == ("large",)


def test_a_repository_is_written_once_and_models_it_lacks_are_skipped(tmp_path: Path) -> None:
    build(tmp_path)
    before = {path: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    edits = plan_edits(tmp_path, {"large": FOUND, "huge": FOUND})
    assert list(edits) == [BUILT, "large/config.pbtxt"]
    assert "+  preferred_batch_size: [ 3 ]" in edits["large/config.pbtxt"].diff()
    assert {path: path.read_text() for path in before} == before, "planning must not write"
    write_edits(edits.values())
    again = plan_edits(tmp_path, {"large": FOUND})
    assert not any(edit.changed or edit.diff() for edit in again.values())


@pytest.mark.parametrize(("delay", "expected"), [(0, 67_800), (1234, 1234)], ids=["none", "positive"])
def test_a_positive_delay_that_is_there_is_kept(delay: int, expected: int) -> None:
    spec = emulated_spec(model={"batching": {"max_queue_delay_microseconds": delay}})
    new = with_thresholds(spec, {"large": FOUND}).models["large"].batching
    assert new == BatchingSpec(3, expected, FOUND.batch_thresholds)


@pytest.mark.parametrize(
    ("fields", "found", "says"),
    [
        pytest.param(
            {"options": {"max_batch_size": 2}},
            {"large": FOUND},
            "models.large.batching: a threshold of 3 is never reached with options.max_batch_size 2; raise that",
            id="small-batch",
        ),
        pytest.param(
            {"entry": {"max_inflight": 4}},
            {"small": FOUND, "large": FOUND},
            "with 2 requests in flight the thresholds small=2, large=2 can deadlock",
            id="deadlock",
        ),
        pytest.param({}, {"huge": FOUND}, "has none of the models huge; name the models in the profile", id="no-model"),
    ],
)
def test_thresholds_that_do_not_fit_are_refused(
    tmp_path: Path, fields: dict[str, Any], found: dict[str, BatchingSpec], says: str
) -> None:
    build(tmp_path, **fields)
    with pytest.raises(ConfigError, match=says):
        plan_edits(tmp_path, found)


def test_a_repository_that_the_builder_did_not_write_is_refused(tmp_path: Path) -> None:
    build(tmp_path)
    (tmp_path / BUILT).unlink()
    with pytest.raises(ConfigError, match=f"{tmp_path}/{BUILT} is missing, so .* did not write .*; describe it"):
        plan_edits(tmp_path, {"large": FOUND})
    (tmp_path / BUILT).write_text("entry: {policy: single, polcy: x}\nmodels: {}")
    with pytest.raises(ConfigError, match=f"{BUILT}: .*unknown field `polcy`.*; remove the file and build"):
        plan_edits(tmp_path, {"large": FOUND})


def test_a_change_by_hand_is_not_undone(tmp_path: Path) -> None:
    build(tmp_path)
    path = tmp_path / "large" / "config.pbtxt"
    text = path.read_text()
    path.write_text(text.replace('"64"', '"65"'))
    with pytest.raises(ConfigError, match=rf"{path} is not what {BUILT} gives.*--config {tmp_path}/{BUILT} --out"):
        plan_edits(tmp_path, {"large": FOUND})
    assert plan_edits(tmp_path, {"small": FOUND})["small/config.pbtxt"].changed, "of another model"


# --- a rebuild --------------------------------------------------------------------------------------------------------


def test_a_rebuild_that_would_undo_a_tuning_can_keep_it() -> None:
    old = with_thresholds(emulated_spec(), {"large": FOUND})
    assert undone(old, old) == []
    new = emulated_spec(entry={"max_inflight": 9})
    assert undone(old, new) == ["large"]
    result = kept(old, new)
    assert (result.models["large"].batching, result.tuned, result.entry) == (FOUND, ("large",), new.entry)
    assert undone(old, emulated_spec(models=("small",))) == [], "the model is gone"
    assert undone(old, emulated_spec(model={"batching": {"threshold": 2}})) == ["large"]
    same = {"threshold": 3, "max_queue_delay_microseconds": 67_800, "batch_thresholds": FOUND.batch_thresholds}
    assert undone(old, emulated_spec(per_model={"large": {"batching": same}})) == [], "the file says the same"


def test_a_tuning_that_does_not_fit_the_new_deployment_is_refused() -> None:
    old = with_thresholds(emulated_spec(), {"large": FOUND})
    with pytest.raises(ConfigError, match=r"options.max_batch_size 2; .*--drop-tuning builds without them"):
        kept(old, emulated_spec(options={"max_batch_size": 2}))
