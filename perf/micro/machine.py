"""`python -m perf.micro.machine`: what measurements ran on, to be kept beside their results."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from datetime import datetime, timezone
from importlib.metadata import distributions
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from perf.command import run
from tools.targets import target_file

PACKAGES = ("nvidia-pytriton", "torch", "transformers", "numpy", "tritonclient", "grpcio", "locust")


def facts() -> dict[str, str]:
    """Name and value of everything that matters, in the order of printing."""
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": _output("git", "rev-parse", "--short=12", "HEAD"),
        "CPU": _cpu(),
        "cores": f"{os.cpu_count()} ({len(os.sched_getaffinity(0))} usable)",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "GPU": _output("nvidia-smi", "--query-gpu=name", "--format=csv,noheader") or "none",
        "system": f"{_distribution()}, Linux {platform.release()}, {' '.join(platform.libc_ver())}",
        "Python": platform.python_version(),
        **{name: _version(name) or "not installed" for name in PACKAGES},
        "perf_analyzer": _perf_analyzer() or "not installed",
    }


def _cpu() -> str:
    text = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    family = re.search(r"^cpu family\s*:\s*(\d+)$", text, re.MULTILINE)
    wide = "AVX-512" if " avx512f" in text else "AVX2" if " avx2" in text else "no AVX2"
    name = model[1] if model else platform.processor() or platform.machine()
    return f"{name}, family {family[1]}, {wide}" if family else name


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except OSError:
        return "unknown distribution"


def _version(package: str, **where: Any) -> str:
    found = next(iter(distributions(name=package, **where)), None)
    return found.version if found else ""


def _perf_analyzer() -> str:
    """The wheel's version where install.sh put one; perf_analyzer itself names its commit alone."""
    own = _version("perf_analyzer", path=[".venv/perf_analyzer/wheel"])
    return own or ("on PATH" if shutil.which("perf_analyzer") else "")


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def main(
    output: Annotated[Path | None, typer.Option(help="Also write this file.", callback=target_file())] = None,
) -> None:
    text = "".join(f"{name + ':':17}{value}\n" for name, value in facts().items())
    print(text, end="")
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)


if __name__ == "__main__":
    run(main)
