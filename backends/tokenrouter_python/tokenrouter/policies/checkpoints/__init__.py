"""Files of trained routers: our own safetensors format (`native`) and readers of the formats of the sources.

Only this module and `native` come without torch; the readers (`r2r`, `citer`, `collm`, `win_rate`) are imported by the
policy that needs one, where it runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from tokenrouter.checkpoint import refuse_pointer
from tokenrouter.errors import ConfigError, InvalidRequest
from tokenrouter.policies.base import PolicyContext
from tokenrouter.policies.checkpoints.native import KINDS, RouterFile, is_native, load_router, save_router

__all__ = [
    "DEFAULT_FOLDER",
    "KINDS",
    "RouterFile",
    "cached",
    "confined",
    "default_checkpoint",
    "is_native",
    "listed",
    "load_router",
    "resolve",
    "save_router",
]

# Where a policy's router is found if parameters name none: DEFAULT_FOLDER/<policy>.safetensors.
DEFAULT_FOLDER = "tokenrouter/1/routers"


def default_checkpoint(context: PolicyContext, policy: str) -> str:
    """The router file that a deployment brings along for a policy, as a path for `confined`; "" if there is none."""
    path = f"{DEFAULT_FOLDER}/{policy}.safetensors"
    return path if context.directory is not None and os.path.isfile(os.path.join(context.directory, path)) else ""


def confined(context: PolicyContext, path: str) -> str:
    """A path from parameters as an absolute path; nothing needs to be there.

    Relative paths are relative to `context.directory`, and no path leads out of it: parameters also come from clients.
    The check is on the path's text, so an operator may place symbolic links in the directory.

    Raises:
        InvalidRequest: the path leads out of the directory.
    """
    root = context.directory
    full = os.path.abspath(os.path.join(root or "", path))
    if root is not None and os.path.commonpath([full, os.path.abspath(root)]) != os.path.abspath(root):
        raise InvalidRequest(f"checkpoint {path!r} lies outside of the deployment's folder; put it there or link it")
    return full


def listed(context: PolicyContext, path: str) -> None:
    """Refuses a path from parameters that is none of `context.checkpoints`: the deployment says what is read at all.

    Raises:
        InvalidRequest: it is not; names those that are. Or it leads out of the directory.
    """
    full = confined(context, path)
    if context.checkpoints is None:
        return
    known = {confined(context, each) for each in context.checkpoints}
    if full not in known:
        offered = ", ".join(sorted(context.checkpoints)) or "none"
        raise InvalidRequest(
            f"policy_params.checkpoint is {path!r}; checkpoints that clients of this deployment may name: {offered} "
            "(policy_checkpoints of the entry model)"
        )


def resolve(context: PolicyContext, path: str, *, shipped: bool = False) -> Path:
    """A path from parameters as an existing file or folder, see `confined` and `listed`.

    Args:
        shipped: it is no parameter but a `default_checkpoint`.

    Raises:
        InvalidRequest: the path leads out of the directory, or parameters may not name it.
        ConfigError: nothing is there, or a Git LFS pointer.
    """
    if not shipped:
        listed(context, path)
    full = confined(context, path)
    if not os.path.exists(full):
        raise ConfigError(f"checkpoint {path!r} does not exist; paths are relative to the deployment's folder")
    if os.path.isfile(full):
        refuse_pointer(Path(full))
    return Path(full)


def cached(loader: Callable[[Path, str], Any], path: Path, device: str) -> Any:
    """`loader(path, device)`, remembered until the file changes: policy instances share weights.

    Remembered as long as some policy holds what was loaded. Errors of the loader are not remembered.
    """
    stat = path.stat()
    key = (loader, path, device, stat.st_mtime_ns, stat.st_size)
    found = _loaded.get(key)
    if found is None:
        found = _loaded[key] = loader(path, device)
    return found


_loaded: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()
