"""What a session of tests leaves behind on the machine: nothing."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

_OF_TORCH = "torchinductor_"
_OF_PYTHON = "multiprocessing.resource_tracker"  # begins with the first spawned process, and ends with this one


@pytest.fixture(scope="session", autouse=True)
def nothing_left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Gives the session a folder of its own for temporary files, and fails if processes or files outlive it."""
    tmp_path_factory.getbasetemp()  # pytest's own folder lies beside it
    began_s = time.time()
    with tempfile.TemporaryDirectory(prefix="ti-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", folder)
        yield
        left = leftovers(Path(folder))
    remove_environments(since_s=began_s)
    if left:
        pytest.fail("this session of tests leaves behind: " + ", ".join(left), pytrace=False)


def leftovers(folder: Path) -> list[str]:
    """Processes of this one, its servers' shared memory, and what lies in its folder for temporary files."""
    left = [
        f"process {child.pid} ({' '.join(child.cmdline())[:80]})"
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and _OF_PYTHON not in " ".join(child.cmdline())
    ]
    left += map(str, Path("/dev/shm").glob(f"tokenrouter-run-{os.getpid()}-*"))
    left += [str(path) for path in folder.iterdir() if not path.name.startswith(_OF_TORCH)]
    return left


def remove_environments(since_s: float) -> None:
    """Removes the empty folders that killed servers leave in /tmp: Triton's Python backend makes one at its start.

    They bear no name of their server. One that is older than every living server belongs to a dead one.
    """
    born_s = [
        process.create_time() for process in psutil.process_iter(["name"]) if process.info["name"] == "tritonserver"
    ]
    for path in Path("/tmp").glob("python_env_*"):
        with contextlib.suppress(OSError):  # not empty, or gone already
            if since_s <= path.stat().st_ctime < min(born_s, default=time.time()):
                path.rmdir()
