"""Trained routers of a deployment: where they go in the repository, and how the policy finds them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tokenrouter.checkpoint import refuse_pointer
from tokenrouter.policies import BUILTIN
from tokenrouter.policies.checkpoints import DEFAULT_FOLDER
from tools.build_repository.model_checks import caught
from tools.build_repository.spec import EntrySpec


def router_path(policy: str, source: str) -> str:
    """Path in the repository, relative to it: `DEFAULT_FOLDER`/policy, with the file's suffix."""
    return f"{DEFAULT_FOLDER}/{policy}{Path(source).suffix if Path(source).is_file() else ''}"


def router_paths(entry: EntrySpec) -> list[str]:
    """Paths in the repository of all routers."""
    return [router_path(policy, source) for policy, source in entry.routers.items()]


def policy_params(entry: EntrySpec) -> dict[str, Any]:
    """Parameters of the deployment's policy, with its router as `checkpoint`."""
    source = entry.routers.get(entry.policy)
    if source is None:
        return entry.policy_params
    return {**entry.policy_params, "checkpoint": router_path(entry.policy, source)}


def placed(entry: EntrySpec) -> EntrySpec:
    """The same once its routers are in the repository."""
    nameable = tuple(dict.fromkeys([*entry.policy_checkpoints, *router_paths(entry)]))
    return replace(entry, policy_params=policy_params(entry), policy_checkpoints=nameable, routers={})


def router_problems(entry: EntrySpec) -> Iterator[str]:
    """Routers that are not there, or of no policy."""
    for policy, source in entry.routers.items():
        if policy not in BUILTIN:
            yield f"entry.routers names the policy {policy!r}; known: {', '.join(BUILTIN)}"
        if not os.path.exists(source):
            yield (
                f"entry.routers.{policy}: {source} does not exist; put the trained router there, train one with "
                "python -m tools.train_router, or say with --checkpoints where it lies"
            )
        elif os.path.isfile(source):
            yield from (f"entry.routers.{policy}: {text}" for text in caught(partial(refuse_pointer, Path(source))))
    if entry.policy in entry.routers and "checkpoint" in entry.policy_params:
        yield f"entry.routers.{entry.policy} and entry.policy_params.checkpoint name a router each; remove one"


def place_routers(entry: EntrySpec, output: Path) -> list[Path]:
    """Copies files and links folders (a classifier of Hugging Face format is large). Returns the paths."""
    paths = []
    for policy, source in entry.routers.items():
        target = output / router_path(policy, source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_symlink() or target.is_file():
            target.unlink()
        if os.path.isdir(source):
            target.symlink_to(source, target_is_directory=True)
        else:
            shutil.copyfile(source, target)
        paths.append(target)
    return paths
