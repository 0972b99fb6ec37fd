"""Measures exact-answer accuracy with batched greedy decoding, in plain transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tools.demo_models.task import Problem, check
from tools.demo_models.tokenizer import END_OF_TEXT_ID, PAD_ID, build_tokenizer

MAX_NEW_TOKENS = 96


def load_model(folder: str | Path) -> PreTrainedModel:
    """Loads a checkpoint folder in float32, ready for inference."""
    # from_pretrained leaves the model in evaluation mode.
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    return model


def load_tokenizer(folder: str | Path | None = None) -> Tokenizer:
    """Loads the tokenizer of a checkpoint folder; without one, builds the tokenizer that all of them share."""
    return build_tokenizer() if folder is None else Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def complete(model: PreTrainedModel, tokenizer: Tokenizer, prompts: Sequence[str]) -> list[list[int]]:
    """Token ids of each completion, decoded greedily in one batch, without the end-of-text token."""
    input_ids, attention_mask = _left_pad([tokenizer.encode(prompt).ids for prompt in prompts])
    was_training = model.training
    model.train(False)
    with torch.inference_mode():
        output: Tensor = model.generate(  # type: ignore[operator]
            input_ids=input_ids,
            attention_mask=attention_mask,
            max_new_tokens=MAX_NEW_TOKENS,
            do_sample=False,
            eos_token_id=END_OF_TEXT_ID,
            pad_token_id=PAD_ID,
        )
    model.train(was_training)
    return [_until_end(row) for row in output[:, input_ids.shape[1] :].tolist()]


def accuracy(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    problems: Sequence[Problem],
    batch_size: int = 128,
    on_batch: Callable[[int], None] = lambda done: None,
) -> float:
    """The share of problems whose final answer is exactly right; `on_batch` gets the size of each finished batch."""
    right = 0
    for start in range(0, len(problems), batch_size):
        batch = problems[start : start + batch_size]
        completions = complete(model, tokenizer, [problem.prompt for problem in batch])
        texts = [tokenizer.decode(ids) for ids in completions]
        right += sum(check(p.prompt, text, p.answer) for p, text in zip(batch, texts, strict=True))
        on_batch(len(batch))
    return right / max(1, len(problems))


def _left_pad(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Pads on the left, so that all rows end together; returns ids and mask, both [batch, length]."""
    width = max(map(len, rows))
    ids = torch.tensor([[PAD_ID] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def _until_end(ids: list[int]) -> list[int]:
    return ids[: ids.index(END_OF_TEXT_ID)] if END_OF_TEXT_ID in ids else ids
