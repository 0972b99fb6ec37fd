"""Writes tuned thresholds into the config.pbtxt files of a Triton model repository, as its queue policy."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from tools.dtmc.errors import RepositoryError
from tools.dtmc.pbtxt import set_parameter, set_scalar
from tools.dtmc.profile import Profile
from tools.dtmc.search import SearchResult

DELAY_ROUNDS = 2  # rounds, in each of which every model makes one step
DELAY_GRID_MICROSECONDS = 100


@dataclass(frozen=True, slots=True)
class QueueFields:
    """What is written for one model.

    Attributes:
        by_in_flight: table n -> B; the largest n has the threshold that stands in `preferred_batch_size`.
        delay_microseconds: written as `max_queue_delay_microseconds` unless the file has a positive one.
    """

    by_in_flight: dict[int, int]
    delay_microseconds: int

    @property
    def threshold(self) -> int:
        """B at the largest number in flight."""
        return self.by_in_flight[max(self.by_in_flight)]


@dataclass(frozen=True, slots=True)
class Edit:
    """One file, before and after; equal if it is up to date."""

    model: str
    path: Path
    before: str
    after: str

    @property
    def changed(self) -> bool:
        """Whether there is anything to write."""
        return self.before != self.after

    def diff(self) -> str:
        """Unified diff, empty if nothing changes."""
        lines = self.before.splitlines(keepends=True), self.after.splitlines(keepends=True)
        return "".join(difflib.unified_diff(*lines, fromfile=str(self.path), tofile=f"{self.path} (tuned)"))


def max_queue_delay_microseconds(profile: Profile, inflight: int) -> int:
    """Upper limit of any wait, in microseconds.

    The limit is a way out of states the thresholds were not tuned for, not part of the rule that was tuned, so it must
    not cut the waits that the thresholds mean to have. A request waits for requests that are busy elsewhere, so the
    limit is the time of `DELAY_ROUNDS` rounds in which every model makes one step with all requests, and hands over.
    """
    steps = sum(model.step_time_ms(inflight) + profile.handoff_ms for model in profile.models.values())
    # Rounded before ceil: 67.8 ms must not become 67.9 by the last bit of a sum.
    cells = math.ceil(round(DELAY_ROUNDS * steps * 1000.0 / DELAY_GRID_MICROSECONDS, 6))
    return cells * DELAY_GRID_MICROSECONDS


def queue_fields(profile: Profile, table: Sequence[SearchResult]) -> dict[str, QueueFields]:
    """The fields of every model, from a table of results for n = 1..N."""
    delay = max_queue_delay_microseconds(profile, max(row.inflight for row in table))
    return {name: QueueFields({row.inflight: row.thresholds[name] for row in table}, delay) for name in profile.names}


def plan_edits(repository: Path, fields: Mapping[str, QueueFields]) -> list[Edit]:
    """Works out the edits of every model of `fields` that the repository has; writes nothing.

    Raises:
        RepositoryError: no such model there, or a file cannot be edited safely.
    """
    paths = {name: repository / name / "config.pbtxt" for name in fields}
    present = {name: path for name, path in paths.items() if path.is_file()}
    if not present:
        raise RepositoryError(
            f"{repository}: no config.pbtxt of {', '.join(fields)}; name the models in the profile as in the repository"
        )
    return [_plan(name, path, fields[name]) for name, path in present.items()]


def write_edits(edits: Sequence[Edit]) -> None:
    """Writes the files that change."""
    for edit in edits:
        if edit.changed:
            edit.path.write_text(edit.after, encoding="utf-8", newline="")


def edited(text: str, fields: QueueFields) -> str:
    """The text of a config.pbtxt with the queue fields set; unchanged if it has them already.

    Raises:
        RepositoryError: it does not parse, batches sequences, has too small a `max_batch_size`, or would change in
            any other field.
    """
    old = _parsed(text)
    _check(old, fields)
    wanted = _wanted(old, fields)
    if wanted == old:
        return text
    queue = wanted.dynamic_batching
    delay, table = queue.max_queue_delay_microseconds, wanted.parameters["batch_thresholds"].string_value
    text = set_scalar(text, ("dynamic_batching", "max_queue_delay_microseconds"), str(delay))
    text = set_scalar(text, ("dynamic_batching", "preferred_batch_size"), f"[ {fields.threshold} ]")
    text = set_parameter(text, "batch_thresholds", table)
    if _parsed(text) != wanted:
        raise RepositoryError("the edit would change other fields; set the queue fields by hand")
    return text


def _plan(name: str, path: Path, fields: QueueFields) -> Edit:
    try:
        before = path.read_bytes().decode()  # not read_text, which would change line ends
        return Edit(name, path, before, edited(before, fields))
    except (OSError, UnicodeDecodeError, RepositoryError) as exc:
        raise RepositoryError(f"{path}: {exc}") from exc


def _wanted(old: model_config_pb2.ModelConfig, fields: QueueFields) -> model_config_pb2.ModelConfig:
    new = model_config_pb2.ModelConfig()
    new.CopyFrom(old)
    queue = new.dynamic_batching
    queue.preferred_batch_size[:] = [fields.threshold]
    # 0 would start every step at once, so it counts as not set.
    queue.max_queue_delay_microseconds = queue.max_queue_delay_microseconds or fields.delay_microseconds
    table = {str(n): threshold for n, threshold in sorted(fields.by_in_flight.items())}
    new.parameters["batch_thresholds"].string_value = json.dumps(table, separators=(",", ":"))
    return new


def _check(config: model_config_pb2.ModelConfig, fields: QueueFields) -> None:
    if config.WhichOneof("scheduling_choice") not in (None, "dynamic_batching"):
        raise RepositoryError(
            f"has {config.WhichOneof('scheduling_choice')}, which excludes dynamic_batching; remove it first"
        )
    highest = max(fields.by_in_flight.values())
    if highest > config.max_batch_size:
        raise RepositoryError(
            f"max_batch_size: {config.max_batch_size} is below the threshold {highest}; raise it, "
            "or set max_batch of the model in the profile"
        )


def _parsed(text: str) -> model_config_pb2.ModelConfig:
    try:
        return text_format.Parse(text, model_config_pb2.ModelConfig())
    except text_format.ParseError as exc:
        raise RepositoryError(f"does not parse as a model configuration: {exc}") from exc
