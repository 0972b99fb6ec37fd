"""Finds the control group folders that bind this process, so that limits are read and not the host's size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def folders(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> Iterator[tuple[int, Path]]:
    """Cgroup version (1 or 2) and folder of this process's group and of all its ancestors; every one of them binds.

    Args:
        controller: version 1's name of the controller, for example `cpu` or `memory`.
        root: where the cgroup file systems are mounted.
        membership: the file that names the groups of this process.
    """
    for names, path in _memberships(membership):
        if not names:
            version, mounts = 2, (root, root / "unified")
        elif controller in names:
            version, mounts = 1, (root / ",".join(names), root / controller)
        else:
            continue
        for mount in dict.fromkeys(mounts):
            yield from ((version, folder) for folder in _ancestry(mount, path))


def read(file: Path) -> str:
    """Contents without surrounding blanks; empty if there is no such file or it may not be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


def _memberships(membership: Path) -> Iterator[tuple[list[str], str]]:
    """Controllers and path from lines `id:controllers:path`; version 2 names no controllers there."""
    for line in read(membership).splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        yield [name for name in names.split(",") if name], path


def _ancestry(mount: Path, path: str) -> Iterator[Path]:
    """The group's folder and those above it. Inside a container the path may not exist; the mount itself does."""
    folder = mount / path.strip("/")
    while folder != mount and mount in folder.parents:
        yield folder
        folder = folder.parent
    yield mount
