"""What `collect` writes and the trainers read: one row per token of the answers, and what is known of each answer.

A folder with ``corpus.safetensors`` (rows) and ``corpus.json`` (examples, models).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from tools.errors import CommandError
from tools.train_router.problems import Example

_ROWS = "corpus.safetensors"
_FACTS = "corpus.json"
_COLUMNS = ("hidden", "top_logits", "small_token", "large_token", "target", "example", "divergent", "sufficient")


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is not per token.

    Attributes:
        text: `large` (the large model's answers) or `gold` (reference texts).
        small_right, large_right: whether each model alone answers right; null where nobody knows.
    """

    models: tuple[str, str]
    folders: tuple[str, str]
    text: str
    examples: list[Example]
    small_right: list[bool | None]
    large_right: list[bool | None]


@dataclass(frozen=True)
class Corpus:
    """Labelled features, T rows, text after text.

    Attributes:
        hidden: [T, H] of the small model, fed to its LM head.
        top_logits: [T, K] float32, its largest raw logits, falling.
        small_token, large_token, target: [T] int64: greedy choice of each model, and the text's token.
        example: [T] int64, index into `facts.examples`.
        divergent: [T] int8, R2R's label: 1, 0, or -1 (unusable).
        sufficient: [T] int8, CITER's label, likewise.
    """

    facts: Facts
    hidden: Tensor
    top_logits: Tensor
    small_token: Tensor
    large_token: Tensor
    target: Tensor
    example: Tensor
    divergent: Tensor
    sufficient: Tensor

    @property
    def small(self) -> Path:
        """Checkpoint folder of the small model."""
        return Path(self.facts.folders[0])

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: getattr(self, name).clone() for name in _COLUMNS}, folder / _ROWS)
        (folder / _FACTS).write_bytes(msgspec.json.format(msgspec.json.encode(self.facts), indent=1))

    @classmethod
    def load(cls, folder: Path) -> Corpus:
        """Reads what `save` wrote.

        Raises:
            CommandError: no such files, or of another version.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            facts = msgspec.json.decode((folder / _FACTS).read_bytes(), type=Facts)
            rows: dict[str, Any] = load_file(folder / _ROWS)
            return cls(facts, **{name: rows[name] for name in _COLUMNS})
        except (OSError, msgspec.MsgspecError, SafetensorError, KeyError) as exc:
            raise CommandError(f"{folder} is not what `collect` wrote ({exc}); collect into it again") from exc

    @staticmethod
    def refuse_foreign(folder: Path) -> None:
        """Only a folder of this kind is written over.

        Raises:
            CommandError: it holds something else.
        """
        if folder.is_dir() and any(folder.iterdir()) and not (folder / _FACTS).is_file():
            raise CommandError(f"{folder} holds other things than what `collect` writes; name a new folder")

    def validation(self, share: float, seed: int) -> Tensor:
        """[T] bool: rows of a random `share` of the examples; whole examples, as neighbours are alike."""
        return held_back(len(self.facts.examples), share, seed)[self.example]


def held_back(count: int, share: float, seed: int) -> Tensor:
    """[count] bool, a random share true; equal arguments give equal choices."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    chosen = torch.zeros(count, dtype=torch.bool)
    chosen[order[: round(count * share)]] = True
    return chosen
