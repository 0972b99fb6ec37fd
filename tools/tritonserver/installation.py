"""Which Triton this machine has, and a backend directory with ours in it."""

from __future__ import annotations

import ctypes.util
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from tools.errors import CommandError

BACKENDS = Path(__file__).resolve().parents[2] / "backends"
CONTAINER = Path("/opt/tritonserver")


class LaunchError(CommandError):
    """Why the server cannot be started, or did not become ready."""


@dataclass(frozen=True)
class Installation:
    """A Triton on this machine.

    Attributes:
        binary: the `tritonserver` executable.
        python_backend: files of Triton's Python backend that our Python-based backend runs on.
        libraries: what LD_LIBRARY_PATH needs.
        origin: how to call it in a message.
        other_backends: folders of further backends that it brings.
    """

    binary: Path
    python_backend: tuple[Path, ...]
    libraries: tuple[Path, ...]
    origin: str
    other_backends: tuple[Path, ...] = ()


def find_installation() -> Installation:
    """NVIDIA's container first, then PATH, then the `nvidia-pytriton` wheel.

    Raises:
        LaunchError: there is none, or none for this Python version.
    """
    on_path = shutil.which("tritonserver")
    for binary in (CONTAINER / "bin" / "tritonserver", Path(on_path) if on_path else None):
        if binary is not None and binary.is_file():
            return _native(binary)
    return _wheel()


def _native(binary: Path) -> Installation:
    root = binary.resolve().parent.parent
    python = root / "backends" / "python"
    if not (python / "libtriton_python.so").is_file():
        raise LaunchError(f"{binary} has no Python backend: {python} holds no libtriton_python.so")
    release = root / "TRITON_VERSION"
    version = f" {release.read_text().strip()}" if release.is_file() else ""
    others = tuple(sorted(path for path in python.parent.iterdir() if path.is_dir() and path != python))
    return Installation(binary, tuple(sorted(python.glob("*"))), (), f"{binary}{version}", others)


def _wheel() -> Installation:
    try:
        import pytriton
    except ImportError as exc:
        raise LaunchError(
            "no tritonserver found: neither NVIDIA's container, nor PATH, nor the nvidia-pytriton wheel; run make venv"
        ) from exc
    package = Path(pytriton.__file__).resolve().parent
    root = package / "tritonserver"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / version / "triton_python_backend_stub"
    if not stub.is_file():
        raise LaunchError(
            f"the nvidia-pytriton wheel has no Python backend stub for Python {version}; use 3.10 to 3.12"
        )
    backend = root / "backends" / "python"
    files = (backend / "libtriton_python.so", backend / "triton_python_backend_utils.py", stub)
    libraries = (package.parent / "nvidia_pytriton.libs", *_shared_python(version))
    return Installation(root / "bin" / "tritonserver", files, libraries, f"nvidia-pytriton {pytriton.__version__}")


def _shared_python(version: str) -> tuple[Path, ...]:
    """Where the stub finds the shared libpython that it links to, if the linker does not know by itself."""
    library = f"libpython{version}.so.1.0"
    own = Path(sysconfig.get_config_var("LIBDIR") or "")
    if (own / library).is_file():
        return (own,)
    if ctypes.util.find_library(f"python{version}") is None:
        raise LaunchError(
            f"Triton's Python backend needs {library}, and neither {own} nor the linker has it: "
            f"apt-get install libpython{version}, or use a Python built with --enable-shared"
        )
    return ()


def assemble_backends(installation: Installation, folder: Path) -> Path:
    """A backend directory. Triton refuses libraries behind links out of it, so its own files are copied."""
    python = folder / "python"
    python.mkdir(parents=True, exist_ok=True)
    for file in installation.python_backend:
        if file.is_file():
            shutil.copy2(file, python / file.name)
    for source in (*installation.other_backends, BACKENDS / "tokenrouter_python"):
        (folder / source.name).unlink(missing_ok=True)
        (folder / source.name).symlink_to(source, target_is_directory=True)
    return folder
