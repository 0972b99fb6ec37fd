"""Switches that break one behaviour of this double each, to see whether a test notices; see `behaviours.BEHAVIOURS`.

`FAKE_TENSORRT_LLM_BREAK=name,name` in the environment breaks some from the start.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tokenrouter.engines.tensorrt_llm.behaviours import BEHAVIOURS

_broken: set[str] = set()


def true(name: str) -> bool:
    """Whether the behaviour is as in TensorRT-LLM."""
    assert name in BEHAVIOURS, name
    return name not in _broken


def broken_now() -> set[str]:
    return set(_broken)


def break_for_good(names: set[str]) -> None:
    """Breaks behaviours for the rest of this process."""
    if unknown := names - set(BEHAVIOURS):
        raise KeyError(f"no such behaviour: {', '.join(sorted(unknown))}")
    _broken.update(names)


@contextmanager
def broken(*names: str) -> Iterator[None]:
    """Breaks behaviours for a while."""
    before = set(_broken)
    break_for_good(set(names))
    try:
        yield
    finally:
        _broken.clear()
        _broken.update(before)


break_for_good({name for name in os.environ.get("FAKE_TENSORRT_LLM_BREAK", "").split(",") if name})
