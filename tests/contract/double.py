"""Where the double of tensorrt_llm lies, and how tests and servers come to use it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path

DOUBLE = Path(__file__).parent / "fake_tensorrt_llm"
"""Folder to put on sys.path: there `import tensorrt_llm` finds the double."""

BREAK = "FAKE_TENSORRT_LLM_BREAK"
"""Environment variable: behaviours of the double that are broken from the start, separated by commas."""


def use_double() -> None:
    """Lets `import tensorrt_llm` find the double in this process."""
    if str(DOUBLE) not in sys.path:
        sys.path.insert(0, str(DOUBLE))


def double_environment(*, broken: Iterable[str] = ()) -> dict[str, str]:
    """Variables for another process, a tritonserver for example: our backend puts PYTHONPATH behind sys.path."""
    paths = [str(DOUBLE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), BREAK: ",".join(broken)}
