"""Runs `pip install` and says how far it is, in a line now and then; for `make venv`: the standard library alone.

.venv/bin/python tools/pip_progress.py -r requirements/serve.lock -r requirements/test.lock
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

LINE_EVERY_S = 10.0
NEEDED_BYTES = 6e9
"""Disk that PyTorch with CUDA and everything else takes; its CPU build takes a third."""
_FETCHING = re.compile(r"(?:Downloading|Using cached) (\S+?)(?: \((.*)\))?$|Processing (\S+\.whl)")


def locked(arguments: Sequence[str]) -> int:
    """How many packages the requirement files among the arguments name."""
    files = [after for option, after in pairwise(arguments) if option == "-r"]
    lines = [line.strip() for file in files for line in Path(file).read_text("utf-8").splitlines()]
    return sum(bool(line) and not line.startswith("#") for line in lines)


def events(lines: Iterable[str], total: int) -> Iterator[tuple[str, bool]]:
    """What pip's lines mean for whoever waits, and whether to tell at once."""
    count = 0
    for line in lines:
        line = line.strip()
        if found := _FETCHING.match(line):
            count += 1
            name = (found[1] or found[3]).rsplit("/", 1)[-1].split("-", 1)[0]
            size = found[2] or ""
            yield (
                f"[{min(count, total)}/{total}] {name} {size}".rstrip(),
                "GB" in size or bool(re.match(r"\d{3}", size)),
            )
        elif line.startswith("Installing collected packages"):
            yield "installing; this takes a minute or two if nothing else runs", True


def main(arguments: Sequence[str]) -> int:
    """Pip's exit code; its complaints go to stderr as they are."""
    total, began_s, told_s = locked(arguments), time.monotonic(), float("-inf")
    free = shutil.disk_usage(Path(sys.prefix)).free
    print(
        f"{total} packages into {sys.prefix}: 3.1 GB to download and 6 GB of disk with the CUDA build of PyTorch that "
        "PyPI gives, 540 MB and 2.2 GB with its CPU build (make TORCH_INDEX=URL: requirements/README.md)",
        flush=True,
    )
    if free < NEEDED_BYTES:
        print(f"note: {free / 1e9:.1f} GB of disk are free here", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar=off", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as pip:
        assert pip.stdout is not None
        for text, at_once in events(pip.stdout, total):
            now_s = time.monotonic()
            if at_once or now_s - told_s >= LINE_EVERY_S:
                print(f"  {now_s - began_s:4.0f} s  {text}", flush=True)
                told_s = now_s
    if pip.returncode == 0:
        print(f"  {time.monotonic() - began_s:4.0f} s  installed", flush=True)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
