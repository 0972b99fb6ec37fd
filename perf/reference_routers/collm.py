"""clinicalml/co-llm: `generate_response`, collm/generate.py, whose two servers are made-up models here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from perf.reference_routers import imports
from perf.reference_routers.rows import Finding, largest, respond
from perf.reference_routers.world import MadeUp
from tokenrouter.messages import PolicySpec
from tokenrouter.policies import load_policy
from tokenrouter.policies.base import PolicyContext

SOURCE = "Co-LLM"
# The small model has a padding token and the deferral token more.
_KNOWN, _END = 50, 1
_REQUESTS, _TOKENS = 50, 60
_MISSING = ("aiohttp", "datasets", "fire", "matplotlib", "matplotlib.pyplot", "pandas", "requests", "seaborn")
_SETTINGS: list[dict[str, Any]] = [
    {"threshold": 0.5},
    {"threshold": 0.15},
    {"threshold": 0.3, "warmup": "linear"},
    {"threshold": 0.3, "warmup": "cosine", "warmup_tokens": 25},
    {"threshold": 0.3, "warmup": "exponential", "warmup_tokens": 40},
]


class _Tokenizer:
    """Token ids are their own text."""

    eos_token_id = _END

    def __call__(self, prompt: list[int]) -> dict[str, list[int]]:
        return {"input_ids": list(prompt)}

    def __len__(self) -> int:
        return _KNOWN

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def compare(source: Path, folder: Path) -> Iterator[Finding]:
    """Whole responses, with and without a warm-up of the threshold."""
    imports.at(source)
    imports.stand_in(*_MISSING, "shortuuid", "rich", "tqdm", "vllm", "vllm.outputs")
    generate = importlib.import_module("collm.generate").generate_response
    world = MadeUp({"small": _KNOWN + 2, "large": _KNOWN}, bias={_END: 0.5}, scale=1.5)
    for settings in _SETTINGS:
        yield _compared(generate, world, settings)


def _compared(generate: Any, world: MadeUp, settings: dict[str, Any]) -> Finding:
    policy = load_policy(
        PolicySpec("collm", msgspec.json.encode({**settings, "vocab_size": _KNOWN}).decode()),
        PolicyContext(("small", "large")),
    )
    compared, by_large, different, difference = 0, 0, 0, 0.0
    for request in range(_REQUESTS):
        prompt = [2 + request % 40, 3, request]
        theirs = _theirs(generate, world, prompt, settings)
        written = list(respond(policy, world, prompt, max_tokens=_TOKENS, end_id=_END))
        ours = [(model, token) for model, token in written if token != _END]
        compared += len(ours)
        by_large += sum(model == "large" for model, _ in ours)
        different += sum(a != b for a, b in zip(ours, theirs.written, strict=True))
        tokens = [token for _, token in ours]
        for position, d in enumerate(theirs.deferral):
            logits = world("small", [*prompt, *tokens[:position]])
            difference = max(difference, largest(logits[-1].sigmoid(), d))
    shown = ", ".join([*(f"{key}={value}" for key, value in settings.items()), f"{by_large / compared:.0%} large"])
    return Finding(SOURCE, "generate_response", shown, compared, difference, different)


def _theirs(generate: Any, world: MadeUp, prompt: list[int], settings: dict[str, Any]) -> Any:
    """Their tokens with their writers, and the deferral probabilities."""

    def small(tokens: list[int], _: int) -> Any:
        logits = world("small", tokens)
        return None, torch.cat([logits[:-1].log_softmax(-1), logits[-1:]])[None]

    def large(tokens: list[int], _: int) -> Any:
        answer = SimpleNamespace(token_ids=[int(world("large", tokens).argmax())])
        return SimpleNamespace(outputs=[answer]), world("large", tokens).log_softmax(-1)[None]

    result = generate(
        (0, prompt),
        _Tokenizer(),
        _Tokenizer(),
        max_tokens=_TOKENS,
        def_threshold=settings["threshold"],
        tokens_per_call=1,
        deferral_strategy="defer",
        get_next_prediction_base=small,
        get_next_prediction_ref=large,
        threshold_warmup_schedule=settings.get("warmup"),
        threshold_warmup_steps=settings.get("warmup_tokens", 15),
    )
    pairs = zip(result["deferral_prob"], result["actual_deferral_threshold"], strict=True)
    models = ["large" if d > limit else "small" for d, limit in pairs]
    written = list(zip(models, result["generated_tokens"], strict=True))
    return SimpleNamespace(written=written, deferral=result["deferral_prob"])
