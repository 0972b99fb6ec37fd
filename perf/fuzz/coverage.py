"""`python -m perf.fuzz.coverage CORPUS OPTIONS`: the process in which libFuzzer runs; `perf.fuzz.codec` starts it."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["tokenrouter"]):
    from perf.fuzz.codec import check


def main() -> None:
    """Never returns: libFuzzer ends the process."""
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
