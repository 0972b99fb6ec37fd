"""Commands that the documents name exist."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
MAKEFILE = (ROOT / "Makefile").read_text("utf-8")
RULES = set(re.findall(r"^([a-z][a-z-]*):", MAKEFILE, re.MULTILINE))
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


def named(pattern: str) -> list[tuple[str, str]]:
    """(document, what the pattern's group finds in its code)."""
    found = set()
    for document in DOCUMENTS:
        for code in CODE.findall(document.read_text("utf-8")):
            found |= {(str(document.relative_to(ROOT)), name) for name in re.findall(pattern, code)}
    return sorted(found)


def test_every_phony_target_has_a_rule() -> None:
    phony = re.search(r"^\.PHONY:(.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert set(phony[1].split()) == RULES


@pytest.mark.parametrize(("document", "target"), named(r"(?:^|[`\n&;]) *make +([a-z][a-z-]*)"))
def test_make_targets_that_documents_name(document: str, target: str) -> None:
    assert target in RULES, f"{document} names make {target}"


@pytest.mark.parametrize(("document", "module"), named(r"python3? -m ((?:tools|perf)[\w.]*)"))
def test_modules_that_documents_run(document: str, module: str) -> None:
    spec = importlib.util.find_spec(module)
    assert spec is not None, f"{document} names python -m {module}"
    if spec.submodule_search_locations is not None:
        assert importlib.util.find_spec(f"{module}.__main__") is not None, f"python -m {module} cannot be run"
