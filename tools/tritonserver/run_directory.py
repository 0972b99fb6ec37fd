"""A server's private directory: its log, its sockets, the prefix of its shared memory; and what dead servers left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenrouter.deadline import write_deadline
from tools.tritonserver.installation import LaunchError

_SHARED_MEMORY = Path("/dev/shm")
_RUN_DIR_PREFIX = "tokenrouter-run-"
_LONGEST_CHANNEL_PATH = 80  # a socket's path has at most 107 bytes; the rest is for the model's name


@dataclass(frozen=True)
class RunDirectory:
    """What a server leaves on this machine while it runs: a private folder, and shared memory named after it.

    Attributes:
        path: the folder, mode 0700.
        lock: descriptor of the locked file `lock` in it. The server's processes inherit it, so the lock says whether
            anything of the server lives, even after the launcher was killed.
    """

    path: Path
    lock: int

    @property
    def channel(self) -> Path:
        """Where the models put their sockets."""
        return self.path / "channel"

    @property
    def memory_prefix(self) -> str:
        """How the names of its files in /dev/shm begin."""
        return _memory_prefix(self.path)

    def announce_end(self, seconds: float) -> None:
        """Tells the models by when responses have to end; see `tokenrouter.deadline`."""
        if self.channel.is_dir():
            write_deadline(self.channel, time.monotonic_ns() + round(seconds * 1e9))

    @classmethod
    def create(cls) -> RunDirectory:
        """A new one.

        Raises:
            LaunchError: the folder for temporary files has too long a name.
        """
        path = Path(tempfile.mkdtemp(prefix=f"{_RUN_DIR_PREFIX}{os.getpid()}-"))
        directory = cls(path, _locked_file(path))
        if len(os.fsencode(directory.channel)) > _LONGEST_CHANNEL_PATH:
            directory.remove()
            raise LaunchError(
                f"{directory.channel} is too long for sockets: set TMPDIR to a folder "
                f"whose name is {len(os.fsencode(directory.channel)) - _LONGEST_CHANNEL_PATH} or more bytes shorter"
            )
        directory.channel.mkdir(mode=0o700)
        return directory

    def remove(self) -> None:
        """Removes the folder and the shared memory; more than once does no harm."""
        if self.path.is_dir():
            _remove_traces(self.path)
            os.close(self.lock)


def remove_stale_run_directories() -> list[Path]:
    """Removes what servers of this user left behind that were killed with their launcher. Returns the folders."""
    removed = []
    for path in Path(tempfile.gettempdir()).glob(f"{_RUN_DIR_PREFIX}*"):
        with contextlib.suppress(OSError), _stale(path) as stale:
            if stale:
                _remove_traces(path)
                removed.append(path)
    return removed


@contextlib.contextmanager
def _stale(path: Path) -> Iterator[bool]:
    if path.lstat().st_uid != os.getuid():
        yield False
        return
    descriptor = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    finally:
        os.close(descriptor)


def _locked_file(folder: Path) -> int:
    """Creates `lock`; the file is locked before it has that name, so nobody can take the folder for stale."""
    descriptor = os.open(folder / "lock.new", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.rename(folder / "lock.new", folder / "lock")
    return descriptor


def _memory_prefix(run_dir: Path) -> str:
    return f"{run_dir.name}_shm_region_"


def _remove_traces(run_dir: Path) -> None:
    for region in _SHARED_MEMORY.glob(f"{_memory_prefix(run_dir)}*"):
        region.unlink(missing_ok=True)
    shutil.rmtree(run_dir, ignore_errors=True)
