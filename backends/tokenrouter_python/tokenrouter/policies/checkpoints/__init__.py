"""Files of trained routers: our own safetensors format (`native`) and readers of the formats of the sources.

Only this module and `native` come without torch; the readers (`r2r`, `citer`, `collm`, `win_rate`) are imported by the
policy that needs one, where it runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

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


def resolve(context: PolicyContext, path: str) -> Path:
    """A path from parameters as an existing file or folder, see `confined`.

    Raises:
        InvalidRequest: the path leads out of the directory.
        ConfigError: nothing is there, or a Git LFS pointer.
    """
    full = confined(context, path)
    if not os.path.exists(full):
        raise ConfigError(f"checkpoint {path!r} does not exist; paths are relative to the deployment's folder")
    if os.path.isfile(full):
        refuse_pointer(Path(full))
    return Path(full)


def cached(loader: Callable[[Path, str], Any], path: Path, device: str) -> Any:
    """`loader(path, device)`, remembered until the file changes: policy instances share weights.

    Errors of the loader are not remembered.
    """
    stat = path.stat()
    return _cached(loader, path, device, (stat.st_mtime_ns, stat.st_size))


@lru_cache(maxsize=8)
def _cached(loader: Callable[[Path, str], Any], path: Path, device: str, stamp: tuple[int, int]) -> Any:
    return loader(path, device)
