"""Lets the large model answer many prompts, a file of answers after the other."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from tokenrouter.checkpoint import end_ids
from tokenrouter.engines.torch.config import TorchEngineConfig
from tokenrouter.engines.torch.engine import TorchEngine
from tools.demo_models.task import Split
from tools.progress import counted
from tools.smollm2.answers import Writer, load, save
from tools.smollm2.prompts import chat_encoder, prompts

# Files of one seed, at most.
_SEEDS = 10_000


@dataclass(frozen=True)
class Plan:
    """How answers are written.

    Attributes:
        batch: prompts decoded together, and answers in a file.
        temperature, seed: of the tokens.
    """

    max_tokens: int
    temperature: float
    seed: int
    batch: int = 64
    threads: int = 1


def write(checkpoint: Path, split: Split, count: int, plan: Plan, output: Path) -> int:
    """Writes the files that are not there yet; returns the number of tokens in all of them."""
    asked = prompts(split)[:count]
    encode = chat_encoder(checkpoint)
    # The probabilities are kept with 11 bits: more than bfloat16 products have, in half the time of float32.
    config = TorchEngineConfig(
        dtype="bfloat16", device="cpu", max_batch_size=plan.batch, max_num_tokens=1024, max_seq_len=1024
    )
    engine = TorchEngine.from_folder(checkpoint, config)
    torch.set_num_threads(plan.threads)
    (end,) = end_ids(checkpoint)
    writer = Writer(engine, end=end, max_tokens=plan.max_tokens, temperature=plan.temperature)
    tokens = 0
    with counted("answers", len(asked)) as advance:
        for number, start in enumerate(range(0, len(asked), plan.batch)):
            path = output / f"t{plan.temperature:g}-s{plan.seed}-{number:03}.pt"
            part = asked[start : start + plan.batch]
            if not path.exists():
                # A seed for each file: stopped and gone on gives the same answers.
                save(writer.write([encode(prompt) for prompt in part], _SEEDS * plan.seed + number), path)
            tokens += sum(len(answer.tokens) for answer in load(path))
            advance(len(part))
    engine.shutdown()
    return tokens
