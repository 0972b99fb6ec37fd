"""New thresholds and speculation for a built repository: `tools.dtmc apply`, `tools.tune`; a rebuild may undo them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from tokenrouter.errors import ConfigError
from tokenrouter.replicas import replica_names
from tokenrouter.speculation import Speculation
from tools.build_repository.build import BUILT, built_deployment, repository_files
from tools.build_repository.spec import BatchingSpec, DeploymentSpec
from tools.build_repository.thresholds import threshold_problems


@dataclass(frozen=True, slots=True)
class Edit:
    """One file, before and after; equal if it is up to date."""

    path: Path
    before: str
    after: str

    @property
    def changed(self) -> bool:
        return self.before != self.after

    def diff(self) -> str:
        """Unified diff, empty if nothing changes."""
        lines = self.before.splitlines(keepends=True), self.after.splitlines(keepends=True)
        return "".join(difflib.unified_diff(*lines, fromfile=str(self.path), tofile=f"{self.path} (tuned)"))


def plan_edits(
    repository: Path, found: Mapping[str, BatchingSpec], speculation: Speculation | None = None
) -> dict[str, Edit]:
    """What new thresholds change, by the file's path in the repository; writes nothing.

    Models of `found` that the repository does not have are left out. Without `speculation` that stays as it is.

    Raises:
        ConfigError: the builder did not write this repository, it has none of these models, a file was changed since,
            or the thresholds do not fit it.
    """
    old = built_deployment(repository)
    names = [name for name in found if name in old.models]
    if not names:
        raise ConfigError(
            f"{repository}: has none of the models {', '.join(found)}; name the models in the profile as there"
        )
    new = with_thresholds(old, {name: found[name] for name in names})
    if speculation is not None:
        new = with_speculation(new, speculation)
    for problem in threshold_problems(new):
        raise ConfigError(f"{repository / BUILT}: {problem}")
    before, after = repository_files(old), repository_files(new)
    replicas = [each for name in names for each in replica_names(name, old.models[name].replicas)]
    also = [file for file in before if before[file] != after[file]]
    files = dict.fromkeys([BUILT, *(f"{each}/config.pbtxt" for each in replicas), *also])
    return {file: _edit(repository, file, before[file], after[file]) for file in files}


def _edit(repository: Path, file: str, before: str, after: str) -> Edit:
    path = repository / file
    text = path.read_text("utf-8")
    if text not in (before, after):
        built = repository / BUILT
        raise ConfigError(
            f"{path} is not what {BUILT} gives: it was changed by hand, or by another release; say it in {built} and "
            f"run python -m tools.build_repository --config {built} --output {repository}"
        )
    return Edit(path, text, after)


def write_edits(edits: Iterable[Edit]) -> None:
    """Writes the files that change."""
    for edit in edits:
        if edit.changed:
            edit.path.write_text(edit.after, "utf-8")


def with_thresholds(spec: DeploymentSpec, found: Mapping[str, BatchingSpec]) -> DeploymentSpec:
    """The deployment with thresholds that were found for it. A positive delay that it has already stays."""
    models, tuned = dict(spec.models), set(spec.tuned)
    for name, new in found.items():
        old = models[name].batching
        # 0 would start every step at once, so it counts as not set.
        delay = old.max_queue_delay_microseconds or new.max_queue_delay_microseconds
        new = replace(new, max_queue_delay_microseconds=delay)
        if new != old:
            models[name] = replace(models[name], batching=new)
            tuned.add(name)
    return replace(spec, models=models, tuned=tuple(name for name in (*models, spec.entry.name) if name in tuned))


def with_speculation(spec: DeploymentSpec, speculation: Speculation) -> DeploymentSpec:
    """The deployment with speculation that was found for it: then the entry model is among the tuned."""
    if spec.entry.speculation == speculation:
        return spec
    tuned = dict.fromkeys([*spec.tuned, spec.entry.name])
    return replace(spec, entry=replace(spec.entry, speculation=speculation), tuned=tuple(tuned))


def undone(old: DeploymentSpec, new: DeploymentSpec) -> list[str]:
    """Models whose tuning in the old deployment is another in the new one; of the entry model, its speculation."""
    models = [n for n in old.tuned if n in new.models and new.models[n].batching != old.models[n].batching]
    return [*models, *([new.entry.name] if _tuned_ahead(old, new) else [])]


def _tuned_ahead(old: DeploymentSpec, new: DeploymentSpec) -> bool:
    """Whether the old deployment's speculation was tuned, and the new one's is another."""
    return old.entry.name in old.tuned and new.entry.speculation != old.entry.speculation


def kept(old: DeploymentSpec, new: DeploymentSpec) -> DeploymentSpec:
    """The new deployment with the thresholds that were tuned in the old one.

    Raises:
        ConfigError: they do not fit it.
    """
    names = [name for name in undone(old, new) if name in new.models]
    models = {name: replace(new.models[name], batching=old.models[name].batching) for name in names}
    tuned = [name for name in old.tuned if name in new.models]
    entry = new.entry
    if old.entry.name in old.tuned:
        entry = replace(entry, speculation=old.entry.speculation)
        tuned.append(entry.name)
    result = replace(new, entry=entry, models={**new.models, **models}, tuned=tuple(tuned))
    for problem in threshold_problems(result):
        raise ConfigError(f"{problem}; the thresholds were tuned, --drop-tuning builds without them")
    return result
