"""The demo task: chained arithmetic, written out step by step.

A prompt names a starting number and a few operations, applied from left to right::

    Start 47: *6, -195, +388, -62 =

and a completion carries them out, one per line, and repeats the result after a mark::

    47*6=282
    282-195=87
    87+388=475
    475-62=413
    #### 413

Most characters are copied and easy for any model. A few are hard: digits that depend on a carry or a borrow further
to the right, and products. A small model fails on a few of those per answer: what token-level routing exploits.

This module needs no torch.
"""

import json
import random
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tools.json_lines import read_json_lines

ANSWER_MARK = "####"
MAX_VALUE = 999
MIN_STEPS = 3
MAX_STEPS = 5

# One problem in sixteen is held out. The split looks at the prompt alone, so no seed can make the two sides meet.
_HELD_OUT_MODULUS = 16

_ANSWER_LINE = re.compile(rf"^{ANSWER_MARK}[ \t]*([0-9]+)[ \t]*\r?$", re.MULTILINE | re.ASCII)


class Split(str, Enum):
    """The side of the split on which a problem lies."""

    TRAIN = "train"
    HELD_OUT = "held_out"


@dataclass(frozen=True)
class Problem:
    """A question and its final answer, a number in decimal."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class WorkedProblem(Problem):
    """With the text that a perfect model writes after the prompt, without the end-of-text token."""

    completion: str

    def without_solution(self) -> Problem:
        """Returns what may be shown to a model under evaluation."""
        return Problem(prompt=self.prompt, answer=self.answer)


def split_of(prompt: str) -> Split:
    """Returns the side on which a prompt lies; a property of the text, not of a seed."""
    return Split.HELD_OUT if zlib.crc32(prompt.encode()) % _HELD_OUT_MODULUS == 0 else Split.TRAIN


def generate_problems(split: Split, seed: int) -> Iterator[WorkedProblem]:
    """Yields an endless stream of problems of one split; equal seeds give equal streams. It may repeat a problem."""
    rng = random.Random(seed)
    while True:
        problem = _draw(rng)
        if split_of(problem.prompt) is split:
            yield problem


def held_out_problems(count: int, seed: int = 0) -> list[Problem]:
    """Returns distinct held-out problems, the same ones for the same arguments."""
    chosen: dict[str, Problem] = {}
    for problem in generate_problems(Split.HELD_OUT, seed):
        if len(chosen) >= count:
            break
        chosen.setdefault(problem.prompt, problem.without_solution())
    return list(chosen.values())


def load_problems(path: str | Path) -> list[Problem]:
    """Reads a problem file; see `read_json_lines`."""
    return read_json_lines(Path(path), Problem)


def dump_problems(problems: Iterable[Problem]) -> str:
    """Returns the text of a problem file, which :func:`load_problems` reads back."""
    records = ({"prompt": problem.prompt, "answer": problem.answer} for problem in problems)
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def extract_answer(prompt: str, completion: str) -> str | None:
    """Returns the number after the answer mark, or None if the text has no such line; an echoed prompt is skipped."""
    # The first mark counts: a model that runs on past its answer has answered nevertheless.
    match = _ANSWER_LINE.search(completion.removeprefix(prompt))
    return match.group(1) if match else None


def check(prompt: str, completion: str, answer: str) -> bool:
    """Tells whether a completion ends in the right answer; the steps before it are not judged."""
    return extract_answer(prompt, completion) == answer


def _draw(rng: random.Random) -> WorkedProblem:
    """Draws one problem. All intermediate results stay within 0..MAX_VALUE."""
    start = value = rng.randint(2, MAX_VALUE)
    operations, lines = [], []
    for _ in range(rng.randint(MIN_STEPS, MAX_STEPS)):
        symbol, operand, result = _draw_operation(rng, value)
        operations.append(f"{symbol}{operand}")
        lines.append(f"{value}{symbol}{operand}={result}\n")
        value = result
    return WorkedProblem(
        prompt=f"Start {start}: {', '.join(operations)} =",
        answer=str(value),
        completion=f"\n{''.join(lines)}{ANSWER_MARK} {value}",
    )


def _draw_operation(rng: random.Random, value: int) -> tuple[str, int, int]:
    """Draws an operation that keeps ``value`` in range; returns (symbol, operand, result)."""
    # Products need a two-digit value, which sums rarely leave: take nearly every chance, or they would be rare.
    if 2 <= value < 100 and rng.random() < 0.8:
        factor = rng.randint(2, 9)
        return "*", factor, value * factor
    if value >= 20 and (value > MAX_VALUE - 20 or rng.random() < 0.6):
        # Leaving less than 100 makes room for a product; leaving anything keeps three-digit borrows frequent.
        low = 10 if value < 100 or rng.random() < 0.6 else value - 99
        operand = rng.randint(max(low, 1), value - 2 if value > 12 else value)
        return "-", operand, value - operand
    operand = rng.randint(10, MAX_VALUE - value)
    return "+", operand, value + operand
