"""Writes a model repository."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenrouter.config.model_yaml import VERSION_FOLDER
from tokenrouter.errors import ConfigError
from tokenrouter.replicas import replica_names
from tools.build_repository.aliases import SHAPES
from tools.build_repository.pbtxt import (
    alias_pbtxt,
    built_yaml,
    entry_pbtxt,
    model_yaml,
    subserver_pbtxt,
    text_pbtxt,
    unary_pbtxt,
)
from tools.build_repository.replicas import replicas_of
from tools.build_repository.routers import place_routers, router_path
from tools.build_repository.spec import DeploymentSpec, load_spec

BUILT = "built_deployment.yaml"


def built_deployment(repository: Path) -> DeploymentSpec:
    """What a repository was built from, completed, with the thresholds that were tuned since.

    Raises:
        ConfigError: the repository is none of the builder's.
    """
    path = repository / BUILT
    if not path.is_file():
        raise ConfigError(
            f"{path} is missing, so python -m tools.build_repository did not write this repository; describe it in a "
            "YAML file as in configs/, and build it"
        )
    try:
        return load_spec(path)
    except ConfigError as exc:
        raise ConfigError(f"{exc}; remove the file and build the repository again") from exc


def name_problems(spec: DeploymentSpec) -> Iterator[str]:
    """No models, or two of one name."""
    entry = spec.entry
    models = [name for model, own in spec.models.items() for name in replica_names(model, own.replicas)]
    names = [entry.name, *filter(None, [entry.unary]), *entry.aliases, *models]
    if len(set(names)) != len(names):
        yield f"model names must differ: {', '.join(names)}"
    if not spec.models:
        yield "models is empty; name at least one"
    for name, alias in entry.aliases.items():
        if not alias.decoupled and entry.unary is None and alias.shape in SHAPES:
            yield f"entry.aliases.{name}.decoupled is false, for which entry.unary has to name a model"
    for name, model in spec.models.items():
        if unknown := [other for other in model.load_after if other not in models or other == name]:
            yield f"models.{name}.load_after names {unknown[0]!r}; known: {', '.join(models)}"


def repository_files(spec: DeploymentSpec) -> dict[str, str]:
    """Every text file of the repository by relative path.

    Args:
        spec: completed (`check.checked`); models that name no GPUs are complete as they are.

    Raises:
        ConfigError: no models, or names that collide.
    """
    for problem in name_problems(spec):
        raise ConfigError(problem)
    entry = spec.entry
    files = {
        BUILT: built_yaml(spec),
        f"{entry.name}/config.pbtxt": entry_pbtxt(spec),
        f"{entry.name}/1/.gitkeep": "",
    }
    if entry.unary is not None:
        files[f"{entry.unary}/config.pbtxt"] = unary_pbtxt(spec)
        files[f"{entry.unary}/1/.gitkeep"] = ""
    for name, alias in entry.aliases.items():
        ensemble = alias.shape in SHAPES
        files[f"{name}/config.pbtxt"] = (
            alias_pbtxt(name, alias, entry) if ensemble else text_pbtxt(name, alias.shape, entry, spec.models)
        )
        files[f"{name}/1/.gitkeep"] = ""
    for model, of in spec.models.items():
        for name, own in replicas_of(model, of).items():
            files[f"{name}/config.pbtxt"] = subserver_pbtxt(name, own, spec, replica_of=model)
            files[f"{name}/1/model.yaml"] = model_yaml(own)
    return files


def write_repository(spec: DeploymentSpec, output: Path) -> list[Path]:
    """Writes every file; checkpoints that lie in the folder stay. Returns the paths."""
    paths = []
    for relative, text in repository_files(spec).items():
        path = output / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
        paths.append(path)
    return [*paths, *place_routers(spec.entry, output)]


def tree(spec: DeploymentSpec) -> str:
    """All files of the repository, one a line, with what is copied, linked or expected to be there."""
    lines = dict.fromkeys(repository_files(spec), "")
    for policy, source in spec.entry.routers.items():
        how = "link to" if Path(source).is_dir() else "copy of"
        lines[router_path(policy, source)] = f"  ({how} {source})"
    for name, model in spec.models.items():
        if model.checkpoint == VERSION_FOLDER:
            lines[f"{name}/1/config.json"] = "  (your checkpoint)"
    shown: list[str] = []
    seen: set[tuple[str, ...]] = set()
    for relative in sorted(lines):
        parts = tuple(relative.split("/"))
        for depth in range(1, len(parts)):
            if parts[:depth] not in seen:
                seen.add(parts[:depth])
                shown.append("  " * (depth - 1) + parts[depth - 1] + "/")
        shown.append("  " * (len(parts) - 1) + parts[-1] + lines[relative])
    return "\n".join(shown)
