"""What the models are asked: sentences with a gap, and what may stand in it (`prompts.json`).

Every combination is either trained on or held out; the split looks at the prompt alone, as that of the arithmetic task.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from tools.demo_models.task import Split, split_of

_FILE = Path(__file__).parents[2] / "configs" / "smollm2" / "prompts.json"


@lru_cache
def prompts(split: Split) -> tuple[str, ...]:
    """All prompts of one side, in an order that looks random and never changes."""
    parts: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    found = list(parts["templates"].pop("plain"))
    for slot, templates in parts["templates"].items():
        found += [template.format(value) for template in templates for value in parts[slot]]
    chosen = sorted({prompt for prompt in found if split_of(prompt) is split})
    random.Random(0).shuffle(chosen)
    return tuple(chosen)


def chat_encoder(folder: Path) -> Callable[[str], list[int]]:
    """From what a user says to token ids by the checkpoint's chat template."""
    from transformers import AutoTokenizer

    tokenizers: Any = AutoTokenizer
    tokenizer = tokenizers.from_pretrained(folder, local_files_only=True)

    def encode(text: str) -> list[int]:
        message = [{"role": "user", "content": text}]
        rendered: str = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        ids: list[int] = tokenizer.encode(rendered, add_special_tokens=False)
        return ids

    return encode
