"""Prompts of load tests."""

from __future__ import annotations

import json
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo" / "problems.jsonl"


def load_prompts(path: Path = DEMO) -> list[str]:
    """The field `prompt` of every line of a JSON-lines file.

    Raises:
        ValueError: names the line that is no such object, or the file if it has none.
    """
    prompts: list[str] = []
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompts.append(str(json.loads(line)["prompt"]))
        except (ValueError, KeyError, TypeError) as exc:
            raise ValueError(f'{path}, line {number}: not an object like {{"prompt": "..."}}: {line[:60]}') from exc
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts
