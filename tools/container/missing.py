"""Which wheels an image lacks: what pip may add there without changing anything that is there.

NVIDIA's image brings its own builds of PyTorch and of everything that TensorRT-LLM needs, and pip's resolver would
replace some of them. So the Dockerfile collects our whole closure as wheels, and installs without the resolver those
whose distribution is missing. Runs before anything of ours is installed: the standard library alone.

    python3 tools/container/missing.py /wheels tensorrt_llm==1.2.1 | xargs python3 -m pip install --no-deps
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import distributions
from pathlib import Path


def normalized(name: str) -> str:
    """A distribution's name as package indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed() -> dict[str, str]:
    """Version by normalized name of every distribution that this Python finds; the first of two on its path counts."""
    found: dict[str, str] = {}
    for distribution in distributions():
        name = distribution.metadata["Name"]
        if name:  # a damaged installation can lack it
            found.setdefault(normalized(name), distribution.version)
    return found


def missing(wheels: Iterable[Path], present: Mapping[str, str]) -> list[Path]:
    """The wheels whose distribution is not `present`, sorted. A wheel's file name begins with its distribution's."""
    return sorted(wheel for wheel in wheels if normalized(wheel.name.split("-", 1)[0]) not in present)


def mismatch(expected: str, present: Mapping[str, str]) -> str | None:
    """Why `expected` (name==version) does not hold, or None; a longer version that begins with it is fine.

    Raises:
        ValueError: it is not of that form.
    """
    name, _, version = expected.partition("==")
    if not name or not version:
        raise ValueError(f"{expected!r} is not of the form name==version")
    have = present.get(normalized(name), "none")
    if re.match(rf"{re.escape(version)}($|[.+])", have):
        return None
    return f"{name} {version} is expected, this image has {have}: choose the image that has it, or expect another"


def main(arguments: Sequence[str]) -> int:
    """Prints the paths, one a line; 1 if an expected version is not there or there are no wheels."""
    folder, expected = Path(arguments[0]), arguments[1:]
    present = installed()
    problems = [problem for each in expected if (problem := mismatch(each, present))]
    wheels = list(folder.glob("*.whl"))
    if not wheels:
        problems.append(f"{folder} has no wheels")
    print("\n".join(problems), file=sys.stderr) if problems else print(*missing(wheels, present), sep="\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
