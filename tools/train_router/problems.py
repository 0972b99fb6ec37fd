"""What is asked of the models, and who says whether an answer is right."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import MappingProxyType

from tools.demo_models import task

Checker = Callable[[str, str, str], bool]

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Example:
    """One question.

    Attributes:
        prompt: as the models get it, chat template included.
        answer: what the checker compares with, or None if nobody knows.
        completion: a reference text, which the sources of CITER and Co-LLM train on, or None.
    """

    prompt: str
    answer: str | None = None
    completion: str | None = None


def demo_examples(count: int, seed: int) -> list[Example]:
    """Worked training problems of the demo task; never held-out ones. Equal arguments give equal problems."""
    problems = islice(task.generate_problems(task.Split.TRAIN, seed), count)
    return [Example(problem.prompt, problem.answer, problem.completion) for problem in problems]


def read_examples(path: Path) -> list[Example]:
    """Reads JSON lines with `prompt` and, if known, `answer` and `completion`.

    Raises:
        ValueError: names file and line.
    """
    examples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            examples.append(Example(**json.loads(line)))
        except (ValueError, TypeError) as exc:
            raise ValueError(f"{path}:{number}: expected an object with prompt, answer, completion: {exc}") from exc
    return examples


def same_number(prompt: str, completion: str, answer: str) -> bool:
    """Whether the last number in the completion is the answer's last number; thousands separators are ignored."""
    found = _NUMBER.findall(completion.replace(",", ""))
    wanted = _NUMBER.findall(answer.replace(",", ""))
    return bool(found and wanted) and float(found[-1]) == float(wanted[-1])


CHECKERS: Mapping[str, Checker] = MappingProxyType({"demo": task.check, "number": same_number})
