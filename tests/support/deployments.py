"""Deployments of published models for the builder: stubs of their checkpoints, and a YAML file with edits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
import yaml
from typer.testing import CliRunner

from tests.support.published_models import write_stub
from tools.build_repository.__main__ import build

Edit = Callable[[dict[str, Any]], object]


def deployment(folder: Path, *edits: Edit) -> Path:
    """A small deployment of two published models on the GPUs of the paper's layout, with edits."""
    content: dict[str, Any] = {
        "checkpoints": "checkpoints",
        "entry": {"policy": "r2r", "routers": {"r2r": "router.pt"}, "max_inflight": 4},
        "models": {
            name: {"engine": "tensorrt_llm", "checkpoint": checkpoint, "gpus": gpus, "options": {"max_seq_len": 4096}}
            for name, checkpoint, gpus in (("small", "Qwen3-0.6B", [0]), ("large", "Qwen3-8B", [0, 1]))
        },
    }
    for edit in edits:
        edit(content)
    for name in ("Qwen3-0.6B", "Qwen3-8B"):
        write_stub(folder / "checkpoints" / name, name)
    (folder / "checkpoints" / "router.pt").write_bytes(b"weights")
    path = folder / "deployment.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def at(path: str, value: Any) -> Edit:
    """Sets the value at a dotted path; ... removes it."""
    *parents, key = path.split(".")

    def edit(content: dict[str, Any]) -> None:
        for parent in parents:
            content = content.setdefault(parent, {})
        if value is ...:
            del content[key]
        else:
            content[key] = value

    return edit


def run(*arguments: str | Path, weights: bool = False) -> Any:
    """The result of the command with these arguments; stubs have no weights."""
    app = typer.Typer()
    app.command()(build)
    more = [] if weights else ["--without-weights"]
    return CliRunner().invoke(app, [str(argument) for argument in (*arguments, *more)])
