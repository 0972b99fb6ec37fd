"""What the GPU image runs, with the tritonserver of this machine and an installed copy of backend and package."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request

import pytest

from tests.support.waiting import until
from tokenrouter.direct_http import http_open
from tools.tritonserver.installation import find_installation
from tools.tritonserver.ports import free_port

pytestmark = pytest.mark.integration

ROOT = Path(__file__).resolve().parents[2]
SERVE = ROOT / "tools" / "container" / "serve.sh"
_MPS = """#!/bin/sh
echo "$0 $* $CUDA_MPS_PIPE_DIRECTORY" > "$CUDA_MPS_LOG_DIRECTORY/started"
"""


def install(folder: Path) -> Path:
    """A virtual environment with the package as a wheel, everything else from ours; returns its python."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    # A path in a .pth file brings our dependencies, but not the editable installation of the package.
    (site / "dependencies.pth").write_text(f"{Path(pytest.__file__).resolve().parents[1]}\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-deps"]
    sources = folder / "sources"  # a copy, since setuptools writes beside what it builds
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        sources.mkdir(exist_ok=True)
        shutil.copy2(ROOT / name, sources)
    shutil.copytree(ROOT / "backends", sources / "backends", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    subprocess.run([*pip, "--no-build-isolation", f"--target={site}", str(sources)], check=True)
    return folder / "bin" / "python3"


def assemble(folder: Path) -> Path:
    """A backend directory as in the image: model.py alone; Triton's own files are copied, as links lead out of it."""
    installation = find_installation()
    for name, files in (
        ("python", installation.python_backend),
        ("tokenrouter_python", (ROOT / "backends" / "tokenrouter_python" / "model.py",)),
    ):
        (folder / name).mkdir(parents=True)
        for file in files:
            if file.is_file():
                shutil.copy2(file, folder / name)
    return folder


@dataclass
class Container:
    """A running serve.sh."""

    process: subprocess.Popen[bytes]
    home: Path
    port: int
    stale: Path

    def ready(self) -> bool:
        assert self.process.poll() is None, (self.home / "log").read_text()
        try:
            with http_open(f"http://127.0.0.1:{self.port}/v2/health/ready", timeout=2) as response:
                return bool(response.status == 200)
        except (URLError, OSError):
            return False

    def regions(self) -> list[Path]:
        prefix = self.stale.name.partition("_shm_region_")[0]
        return list(self.stale.parent.glob(f"{prefix}*"))


@pytest.fixture(scope="module")
def container() -> Iterator[Container]:
    with tempfile.TemporaryDirectory(prefix="ts-") as name:  # pytest's folders are too long for sockets
        home = Path(name)
        python = install(home / "venv")
        installation = find_installation()
        (python.parent / "tritonserver").symlink_to(installation.binary)
        mps = python.parent / "nvidia-cuda-mps-control"
        mps.write_text(_MPS)
        mps.chmod(0o755)
        ports = [free_port()]
        ports += [free_port(taken=ports)]
        ports += [free_port(taken=ports)]
        env = {
            "PATH": f"{python.parent}:/usr/bin:/bin",
            "LD_LIBRARY_PATH": os.pathsep.join(map(str, installation.libraries)),
            "HOME": name,
            "TMPDIR": name,
            "MODEL_REPOSITORY": str(ROOT / "model_repository"),
            "LISTEN_ADDRESS": "127.0.0.1",
            "TOKENROUTER_RUNTIME_DIR": f"{name}/channel",
            "TOKENROUTER_EXIT_TIMEOUT_S": "5",
            "TOKENROUTER_MPS": "1",
            "CUDA_MPS_PIPE_DIRECTORY": f"{name}/mps",
            "CUDA_MPS_LOG_DIRECTORY": f"{name}/mps-log",
        }
        checksum = "printf %s \"$(uname -n)$TOKENROUTER_RUNTIME_DIR\" | cksum | cut -d ' ' -f 1"
        server = subprocess.run(["sh", "-c", checksum], env=env, capture_output=True, text=True, check=True).stdout
        stale = Path(f"/dev/shm/tokenrouter-{server.strip()}_shm_region_left")
        stale.write_bytes(b"x")
        arguments = [f"--{kind}-port={port}" for kind, port in zip(("http", "grpc", "metrics"), ports, strict=True)]
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(
                [str(SERVE), f"--backend-directory={assemble(home / 'backends')}", *arguments],
                env=env, cwd=name, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        running = Container(process, home, ports[0], stale)
        try:
            until(running.ready, within_s=240, what="ready")
            yield running
        finally:
            process.kill()
            process.wait()


def test_routed_response_from_an_installed_copy(container: Container) -> None:
    fields = {
        "text_input": "Start 91: -38, *2, -47 =", "max_tokens": 160, "exclude_input_in_output": True,
        "return_routing": True,
    }  # fmt: skip
    url = f"http://127.0.0.1:{container.port}/v2/models/tokenrouter/generate"
    with http_open(Request(url, json.dumps(fields).encode()), timeout=60) as response:
        answer = json.load(response)
    assert answer["text_output"].endswith("#### 59")
    assert json.loads(answer["routing"])["handoffs"] > 0
    maps = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(container.process.pid)]
    assert any(b"triton_python_backend_stub" in line for line in maps)
    assert str(container.home / "venv") in imported_package(container)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def imported_package(container: Container) -> str:
    """Where a fresh python of the environment finds the package, as the stubs do."""
    command = [str(container.home / "venv/bin/python3"), "-c", "import tokenrouter; print(tokenrouter.__file__)"]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=container.home).stdout


def test_shared_memory_of_a_killed_predecessor_is_removed(container: Container) -> None:
    assert not container.stale.exists()
    assert container.regions()


def test_mps_runs_before_the_models_load(container: Container) -> None:
    started = (container.home / "mps-log" / "started").read_text()
    assert started.split()[1:] == ["-d", str(container.home / "mps")]
    environment = Path(f"/proc/{container.process.pid}/environ").read_bytes().split(b"\0")
    assert f"CUDA_MPS_PIPE_DIRECTORY={container.home}/mps".encode() in environment


def test_sigterm_reaches_tritonserver_and_leaves_nothing(container: Container) -> None:
    """Last: it ends the server of this module."""
    assert b"tritonserver" in Path(f"/proc/{container.process.pid}/cmdline").read_bytes().split(b"\0")[0]
    container.process.send_signal(signal.SIGTERM)
    assert container.process.wait(timeout=30) == 0
    assert container.regions() == []
    assert not (container.home / "channel").exists()
