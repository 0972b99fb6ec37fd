"""What `make venv` says while pip works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.pip_progress import events, locked

ROOT = Path(__file__).parents[2]
PIP = """\
Collecting numpy==2.2.6
  Downloading numpy-2.2.6-cp310-cp310-manylinux.whl (16.8 MB)
Collecting torch==2.13.0
  Downloading torch-2.13.0-cp310-cp310-manylinux_2_28_x86_64.whl (527.0 MB)
Processing /wheels/six-1.17.0-py2.py3-none-any.whl
Requirement already satisfied: pip in ./lib
Installing collected packages: six, numpy, torch
Successfully installed numpy-2.2.6 six-1.17.0 torch-2.13.0
""".splitlines()


def test_packages_are_counted_and_large_ones_named_at_once() -> None:
    assert list(events(PIP, 3)) == [
        ("[1/3] numpy 16.8 MB", False),
        ("[2/3] torch 527.0 MB", True),
        ("[3/3] six", False),
        ("installing; this takes a minute or two if nothing else runs", True),
    ]


def test_the_number_of_packages_is_that_of_the_lock_files(tmp_path: Path) -> None:
    (tmp_path / "a.lock").write_text("# comment\nnumpy==2\n\nsix==1\n")
    assert locked(["--find-links", "x", "-r", str(tmp_path / "a.lock"), "-r", str(tmp_path / "a.lock")]) == 4


def test_a_failure_of_pip_is_told_and_its_exit_code_kept() -> None:
    script = ROOT / "tools" / "pip_progress.py"
    command = [sys.executable, "-S", str(script), "--no-index", "a-package-that-is-nowhere"]
    ran = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert ran.returncode == 1
    assert "a-package-that-is-nowhere" in ran.stderr
    assert "installed" not in ran.stdout
