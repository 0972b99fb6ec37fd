"""What is asked of the models, and who says whether an answer is right."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import islice
from types import MappingProxyType

import msgspec

from tools.demo_models import task

Checker = Callable[[str, str, str], bool]

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


class Example(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


def same_number(prompt: str, completion: str, answer: str) -> bool:
    """Whether the last number in the completion is the answer's last number; thousands separators are ignored."""
    found = _NUMBER.findall(completion.replace(",", ""))
    wanted = _NUMBER.findall(answer.replace(",", ""))
    return bool(found and wanted) and float(found[-1]) == float(wanted[-1])


CHECKERS: Mapping[str, Checker] = MappingProxyType({"demo": task.check, "number": same_number})
