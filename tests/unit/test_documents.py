"""Pages that readers start from: what the README promises, links, the index, and how commands are written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.support.commands import run
from tools.build_repository.__main__ import build

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "requirements" / "README.md", *PAGES]


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) < 150


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text("utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (document.parent / target).exists()] == []


def test_the_index_has_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    assert [page.name for page in PAGES if page.name != "index.md" and f"]({page.name})" not in index] == []


@pytest.mark.parametrize("document", [ROOT / "README.md", *PAGES], ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_work_from_a_fresh_shell(document: Path) -> None:
    """A shell that has not entered .venv; inside containers the command is python3."""
    bare = re.findall(r"(?<![\w/.-])(?:python -m (?:tools|perf|tokenrouter)[\w.]*|tokenrouter (?:generate|top)\b).*",
                      document.read_text("utf-8"))  # fmt: skip
    assert bare == [], "write .venv/bin/python -m ..., .venv/bin/tokenrouter ..."


def test_the_deployment_of_the_readme_is_built(tmp_path: Path) -> None:
    """With the shipped pair's checkpoints under the names that it uses."""
    (text,) = re.findall(r"^```yaml\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert len(text.splitlines()) == 7
    (tmp_path / "my.yaml").write_text(text)
    for name, model in yaml.safe_load(text)["models"].items():
        (tmp_path / model["checkpoint"]).symlink_to(ROOT / "model_repository" / name / "1", target_is_directory=True)
    result = run(
        build, "--config", tmp_path / "my.yaml", "--output", tmp_path / "out", "--checkpoints", tmp_path, "--dry-run"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].startswith("dry run: all checks passed, nothing was written.")
    assert not (tmp_path / "out").exists()
