"""Editing config.pbtxt: only the queue fields change, whatever the file looks like."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tools.dtmc.apply import (
    QueueFields,
    edited,
    max_queue_delay_microseconds,
    plan_edits,
    queue_fields,
    write_edits,
)
from tools.dtmc.errors import RepositoryError
from tools.dtmc.pbtxt import set_scalar
from tools.dtmc.profile import load_profile
from tools.dtmc.search import search_table

PROFILE = load_profile(Path(__file__).parents[2] / "configs" / "profiles" / "r2r_qwen3_0.6b_32b.yaml")
FIELDS = QueueFields({1: 1, 2: 2, 3: 2, 4: 3}, delay_microseconds=67800)

FILES = {
    "nothing": 'name: "m"\nmax_batch_size: 8\n',
    "no-newline-at-the-end": 'name: "m" max_batch_size: 8',
    "comments": """# kept
name: "m"  # kept { too
max_batch_size: 8
dynamic_batching {  # kept as well
  # and this
  preferred_batch_size: [ 1, 4 ]  # the values of before
  default_queue_policy { max_queue_size: 7 }
}
parameters { key: "role", value: { string_value: "subserver" } }
""",
    "one-by-one": "max_batch_size: 8\ndynamic_batching {\n  preferred_batch_size: 1\n  preferred_batch_size: 4\n}\n",
    "one-line": "max_batch_size: 8 dynamic_batching { max_queue_delay_microseconds: 0 }",
    "empty-block": "max_batch_size: 8\ndynamic_batching { }\n",
    "empty-block-of-two-lines": "max_batch_size: 8\ndynamic_batching {\n}\n",
    "colon-and-angles": "max_batch_size: 8\ndynamic_batching: < preferred_batch_size: [4]; >\n",
    "parameter-there": """max_batch_size: 8
parameters: [
  { key: 'other' value { string_value: "batch_thresholds" } },
  { key: "batch_thresholds" value: { string_value: "{\\"1\\":" "7}" } }
]
""",
    "parameter-without-value": 'max_batch_size: 8 parameters { key: "batch_thresholds" }',
    "braces-in-strings": 'max_batch_size: 8 parameters { key: "x}" value { string_value: "dynamic_batching {\\" #" } }',
    "carriage-returns": 'max_batch_size: 8\r\ndynamic_batching {\r\n  preferred_batch_size: [ 1 ]\r\n}\r\n',
}  # fmt: skip


def config(text: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


@pytest.mark.parametrize("text", FILES.values(), ids=FILES.keys())
def test_the_queue_fields_are_set_and_nothing_else(text: str) -> None:
    after = edited(text, FIELDS)
    new, old = config(after), config(text)
    assert list(new.dynamic_batching.preferred_batch_size) == [3]
    assert new.dynamic_batching.max_queue_delay_microseconds == 67800
    assert json.loads(new.parameters["batch_thresholds"].string_value) == {"1": 1, "2": 2, "3": 2, "4": 3}
    for message in (new, old):  # what is left must be equal
        message.dynamic_batching.ClearField("preferred_batch_size")
        message.dynamic_batching.ClearField("max_queue_delay_microseconds")
        message.parameters.pop("batch_thresholds", None)
    assert new == old
    assert edited(after, FIELDS) == after, "not idempotent"


def test_comments_and_layout_stay() -> None:
    before, after = FILES["comments"], edited(FILES["comments"], FIELDS)
    changed = [line for line in before.splitlines() if line not in after.splitlines()]
    assert changed == ["  preferred_batch_size: [ 1, 4 ]  # the values of before"]
    assert "  preferred_batch_size: [ 3 ]  # the values of before\n" in after


def test_a_delay_that_is_there_is_kept() -> None:
    text = "max_batch_size: 8\ndynamic_batching { max_queue_delay_microseconds: 1234 }\n"
    assert config(edited(text, FIELDS)).dynamic_batching.max_queue_delay_microseconds == 1234


def test_the_delay_is_two_rounds_of_steps() -> None:
    assert max_queue_delay_microseconds(PROFILE, 8) == 2 * (6000 + 27900)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("max_batch_size: 2", "max_batch_size: 2 is below the threshold 3; raise it", id="small-batch"),
        pytest.param("max_batch_size: 8 sequence_batching { }", "has sequence_batching, which excludes", id="sequence"),
        pytest.param("max_batch_size: 8 dynamic_batching {", "does not parse as a model configuration", id="unclosed"),
        pytest.param("max_bach_size: 8", "does not parse as a model configuration", id="unknown-field"),
    ],
)
def test_a_file_that_cannot_be_tuned_is_refused(text: str, message: str) -> None:
    with pytest.raises(RepositoryError, match=message):
        edited(text, FIELDS)


@pytest.mark.parametrize("text", ["a { b: 1", "a: }", "a: [ 1", "{ }", "a: 'x", "a:"])
def test_malformed_text_is_an_error_with_its_line(text: str) -> None:
    with pytest.raises(RepositoryError, match="line 1: "):
        set_scalar(text, ("a", "b"), "1")


def test_a_repository_is_written_once_and_models_it_lacks_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "large" / "config.pbtxt"
    path.parent.mkdir()
    path.write_text(FILES["comments"])
    fields = queue_fields(PROFILE, search_table(PROFILE, 4))
    (edit,) = plan_edits(tmp_path, fields)
    assert edit.changed
    assert "+  preferred_batch_size: [ 3 ]" in edit.diff()
    assert path.read_text() == FILES["comments"], "planning must not write"
    write_edits([edit])
    (again,) = plan_edits(tmp_path, fields)
    assert not again.changed
    assert again.diff() == ""


def test_a_repository_without_any_model_of_the_profile_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RepositoryError, match=r"no config\.pbtxt of small, large; name the models"):
        plan_edits(tmp_path, {"small": FIELDS, "large": FIELDS})
