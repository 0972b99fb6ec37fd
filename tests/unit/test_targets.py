"""Files and folders that commands write are checked first, and options have one name everywhere."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import pytest
import typer

from tests.support.commands import run
from tools.targets import IMAGE_SUFFIXES, target_file, target_folder

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "backends" / "tokenrouter_python" / "tokenrouter"
SOURCES = sorted([*(ROOT / "tools").rglob("*.py"), *(ROOT / "perf").rglob("*.py"), *PACKAGE.rglob("*.py")])
READ = {
    *("profile", "problems", "prompts", "config", "checkpoints", "model_repository", "small", "large", "data", "model"),
    *("deployment", "source", "trace", "offline", "chat_template", "tls_cert", "tls_key", "overlay", "prices"),
}
"""Options that name what is read."""
OTHER_NAMES = {
    "out": "--output",
    "profile_out": "--output",
    "report_file": "--output",
    "grpc": "--url",
    "grpc_url": "--url",
    "repository": "--model-repository",
    "concurrency": "--inflight",
    "in_flight": "--inflight",
    "warmup": "--warm-up",
    "batch_size": "--batch",
}


def options() -> Iterator[tuple[str, str, str, ast.Call]]:
    """(file, name, type, the call of `typer.Option`) of every option and of every alias of one."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.arg):
                name, annotation = node.arg, node.annotation
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name, annotation = node.targets[0].id, node.value
            else:
                continue
            if not (isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated"):
                continue
            assert isinstance(annotation.slice, ast.Tuple)
            kind, *rest = annotation.slice.elts
            for call in rest:
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "typer.Option":
                    yield str(path.relative_to(ROOT)), name, ast.unparse(kind), call


def test_every_path_that_is_written_is_checked_before_the_work() -> None:
    unchecked = [
        f"{path}: {name}"
        for path, name, kind, call in options()
        if kind in ("Path", "Path | None")
        and name not in READ
        and not {"callback", "exists"} & {keyword.arg for keyword in call.keywords}
        and name != "ProfileFile"
    ]
    assert unchecked == [], "give it callback=target_file() or target_folder(), or name it in READ"


def test_an_option_has_one_name_everywhere() -> None:
    assert [f"{path}: {name} is {OTHER_NAMES[name]}" for path, name, *_ in options() if name in OTHER_NAMES] == []


def _command(
    output: Annotated[Path | None, typer.Option(callback=target_file())] = None,
    plot: Annotated[Path | None, typer.Option(callback=target_file(*IMAGE_SUFFIXES))] = None,
    folder: Annotated[Path | None, typer.Option(callback=target_folder())] = None,
) -> None:
    print("worked")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("option", "name", "fault"),
    [
        ("--output", ".", "is a folder; name a file in it"),
        ("--output", "file/new", "{place}/file is no folder; name another place"),
        ("--plot", "a.txt", "the name must end in .png or .svg or .pdf"),
        ("--folder", "file", "{place}/file is no folder; name another place"),
        ("--folder", "file/deeper/new", "{place}/file is no folder; name another place"),
    ],
)
def test_what_cannot_be_written_is_refused_in_one_line(place: Path, option: str, name: str, fault: str) -> None:
    result = run(_command, option, place / name)
    expected = f"error: {option} {place / name}: {fault.format(place=place)}\n"
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", expected)


def test_a_place_without_permission(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "tokenrouter.targets.os.access", lambda _, mode: not mode & os.W_OK
    )  # whoever runs the tests may be root
    for option, name in (("--output", "file"), ("--output", "new"), ("--folder", "new")):
        result = run(_command, option, place / name)
        assert result.exit_code == 2
        assert "may not be written" in result.stderr


def test_folders_that_are_not_there_yet_are_fine(place: Path) -> None:
    result = run(_command, "--output", place / "a" / "b", "--plot", place / "file.png", "--folder", place / "c" / "d")
    assert (result.exit_code, result.output) == (0, "worked\n")
    assert sorted(path.name for path in place.iterdir()) == ["file"], "asking makes nothing"
