"""What the large model answers, and how sure it was of every token: what the small one is distilled from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from tokenrouter.engines.base import EngineRow
from tokenrouter.engines.torch.engine import TorchEngine
from tools.errors import CommandError

# Candidates of a position that are kept; together they have nearly all of the probability.
TOP = 16


@dataclass(frozen=True)
class Answer:
    """One prompt and its answer of n tokens.

    Attributes:
        prompt: [p] int32, the chat template's tokens included.
        tokens: [n] int32; the last one ends the answer, unless it grew too long.
        candidates: [n, TOP] int32, the most probable tokens at each position, best first.
        log_probs: [n, TOP] float16, of the candidates.
    """

    prompt: Tensor
    tokens: Tensor
    candidates: Tensor
    log_probs: Tensor


class Writer:
    """Decodes answers with one engine, a batch of prompts after the other."""

    def __init__(self, engine: TorchEngine, *, end: int, max_tokens: int, temperature: float) -> None:
        """With a temperature of 0 the most probable token is taken."""
        self._engine, self._end, self._max_tokens = engine, end, max_tokens
        self._temperature = temperature
        self._generator = torch.Generator()

    def write(self, prompts: Sequence[Sequence[int]], seed: int) -> list[Answer]:
        """Answers to at most a batch of prompts, in their order."""
        self._generator.manual_seed(seed)
        engine, limit = self._engine, self._max_tokens
        handles = [engine.open(kv_tokens=len(ids) + limit, prompt_tokens=len(ids)) for ids in prompts]
        pending = [list(ids) for ids in prompts]
        written: list[list[tuple[int, Tensor, Tensor]]] = [[] for _ in prompts]
        open_rows = list(range(len(prompts)))
        while open_rows:
            for part in self._parts(open_rows, pending):
                self._step(part, handles, pending, written)
            open_rows = [i for i in open_rows if written[i][-1][0] != self._end and len(written[i]) < limit]
        for handle in handles:
            engine.close(handle)
        return [_answer(ids, rows) for ids, rows in zip(prompts, written, strict=True)]

    def _parts(self, rows: Sequence[int], pending: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """The rows of one step each: prompts are long, and a step takes only so many tokens."""
        part: list[int] = []
        for row in rows:
            if part and sum(len(pending[i]) for i in (*part, row)) > self._engine.info.max_num_tokens:
                yield part
                part = []
            part.append(row)
        yield part

    def _step(
        self,
        rows: Sequence[int],
        handles: Sequence[object],
        pending: list[list[int]],
        written: list[list[tuple[int, Tensor, Tensor]]],
    ) -> None:
        logits = torch.log_softmax(self._engine.step([EngineRow(handles[i], pending[i]) for i in rows]).logits, -1)
        best = logits.topk(TOP)
        chosen = self._choose(best.indices, best.values)
        for place, i in enumerate(rows):
            token = int(chosen[place])
            written[i].append((token, best.indices[place].int(), best.values[place].half()))
            pending[i] = [token]

    def _choose(self, candidates: Tensor, log_probs: Tensor) -> Tensor:
        """One of the candidates of each row, [rows, TOP]; returns [rows]."""
        if self._temperature == 0:
            return candidates[:, 0]
        weights = torch.softmax(log_probs / self._temperature, -1)
        return candidates.gather(1, torch.multinomial(weights, 1, generator=self._generator))[:, 0]


def _answer(prompt: Sequence[int], rows: Sequence[tuple[int, Tensor, Tensor]]) -> Answer:
    tokens, candidates, log_probs = zip(*rows, strict=True)
    return Answer(
        torch.tensor(prompt, dtype=torch.int32),
        torch.tensor(tokens, dtype=torch.int32),
        torch.stack(candidates),
        torch.stack(log_probs),
    )


def save(answers: Sequence[Answer], path: Path) -> None:
    """Writes answers; a file that is there was written to its end."""
    draft = path.with_suffix(".part")
    torch.save([{field.name: getattr(a, field.name) for field in fields(Answer)} for a in answers], draft)
    draft.replace(path)


def load(path: Path) -> list[Answer]:
    return [Answer(**values) for values in torch.load(path, weights_only=True)]


def load_folder(folder: Path) -> list[Answer]:
    """The answers of all files in a folder.

    Raises:
        CommandError: there is none.
    """
    found = [answer for path in sorted(folder.glob("*.pt")) for answer in load(path)]
    if not found:
        raise CommandError(f"{folder} has no answers; python -m tools.smollm2 answers writes them")
    return found
