"""Zengwh02/GlimpRouter: `glimprouter`, src/glimp_router.py, whose two servers are made-up models here.

They exchange texts and we exchange tokens; with a vocabulary of letters, the blank line and the end of the thinking,
one token each, both are the same. Compared are the steps up to the end of the thinking, and who goes on from there.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from perf.reference_routers import imports
from perf.reference_routers.rows import Finding, respond
from perf.reference_routers.world import MadeUp
from tokenrouter.messages import PolicySpec
from tokenrouter.policies import load_policy
from tokenrouter.policies.base import Policy, PolicyContext
from tokenrouter.policies.measures import entropy

SOURCE = "GlimpRouter"
_TEXTS = [*"abcdefghijklmnopqrstuv", "\n\n", "</think>"]
_SEPARATOR, _END = len(_TEXTS) - 2, len(_TEXTS) - 1
_PROMPT = 0
_REQUESTS = 60
_NAMES = {"4b": "small", "32b": "large"}
_SETTINGS = [
    {"threshold": 2.65, "think_limit": 8192},
    {"threshold": 2.5, "think_limit": 8192},
    {"threshold": 2.65, "think_limit": 12},
]


class _Letters:
    """The tokenizer of this vocabulary."""

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(_TEXTS[token] for token in ids)


def _ids(text: str) -> list[int]:
    return [_TEXTS.index(part) for part in re.findall(r"</think>|\n\n|.", text)]


class _Server:
    """Answers what their OpenAI client is asked."""

    def __init__(self, model: str, world: MadeUp) -> None:
        self._model, self._world = model, world
        self.chat = SimpleNamespace(completions=self)

    def create(self, *, messages: list[dict[str, str]], max_tokens: int, **more: Any) -> Any:
        history = _ids(messages[1]["content"].removeprefix("<think>")) if len(messages) > 1 else []
        if more.get("logprobs"):
            return self._glimpse(history, more["top_logprobs"])
        written: list[int] = []
        while len(written) < max_tokens and _SEPARATOR not in written:
            written.append(int(self._world(self._model, [*history, *written]).argmax()))
            if "stop" not in more and len(written) > 3:  # the final answer, of which nothing is compared
                break
        text = "".join(_TEXTS[token] for token in written).removesuffix("\n\n")
        choice = SimpleNamespace(message=SimpleNamespace(content=text))
        return SimpleNamespace(choices=[choice], usage=SimpleNamespace(completion_tokens=len(written)))

    def _glimpse(self, history: list[int], top: int) -> Any:
        log_p, ids = self._world(self._model, history).log_softmax(-1).topk(top)
        found = [
            SimpleNamespace(token=_TEXTS[token], logprob=value)
            for token, value in zip(ids.tolist(), log_p.tolist(), strict=True)
        ]
        first = SimpleNamespace(token=found[0].token, top_logprobs=found)
        choice = SimpleNamespace(
            message=SimpleNamespace(content=first.token), logprobs=SimpleNamespace(content=[first])
        )
        return SimpleNamespace(choices=[choice])


def compare(source: Path, folder: Path) -> Iterator[Finding]:
    """Whole responses: steps that either model writes, repeated ones, and a spent budget."""
    imports.at(source / "src")
    imports.stand_in("openai", "tqdm")
    theirs: Any = importlib.import_module("glimp_router")
    for number, settings in enumerate(_SETTINGS):
        policy = load_policy(
            PolicySpec("glimprouter", msgspec.json.encode(settings).decode()),
            PolicyContext(("small", "large"), tokenizer=_Letters()),  # type: ignore[arg-type]
        )
        compared, by_large, difference, different = 0, 0, 0.0, 0
        for request in range(_REQUESTS):
            world = MadeUp(dict.fromkeys(("small", "large"), len(_TEXTS)), {_SEPARATOR: 1.2, _END: -0.2}, seed=request)
            theirs.clients = {size: _Server(name, world) for size, name in _NAMES.items()}
            steps = _their_steps(theirs, settings, request, folder / f"glimprouter_{number}")
            written, wrong, apart = _compared(policy, world, steps)
            compared, different, difference = compared + len(written), different + wrong, max(difference, apart)
            by_large += written.count("large")
        shown = ", ".join([*(f"{key}={value}" for key, value in settings.items()), f"{by_large / compared:.0%} large"])
        yield Finding(SOURCE, "glimprouter", shown, compared, difference, different)


def _their_steps(theirs: Any, settings: dict[str, Any], request: int, folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = theirs.glimprouter(
        {"problem": "p"},
        options="math",
        score_threshold=settings["threshold"],
        token_budget=settings["think_limit"],
        problem_id=request,
        output_dir=str(folder),
    )
    return found[:-1]  # without the answer


def _compared(policy: Policy, world: MadeUp, steps: list[dict[str, Any]]) -> tuple[list[str], int, float]:
    """The writers of the tokens, how many differ in token or writer, and the largest difference of an entropy."""
    wanted: list[tuple[str, int]] = []
    apart = 0.0
    for step in steps:
        history = [token for _, token in wanted]
        ours = entropy(world("small", history).topk(20).values[None])
        apart = max(apart, abs(float(ours) - step["score"]))
        writer = "small" if step["base_model_step"] is None else "large"
        wanted += [(writer, token) for token in [*_ids(step["step_str"]), _SEPARATOR]]
    ends = [i for i, (_, token) in enumerate(wanted) if token == _END]
    wanted = wanted[: ends[0] + 1] if ends else wanted
    # The large model writes the answer.
    response = respond(
        policy, lambda model, tokens: world(model, tokens[1:]), [_PROMPT], max_tokens=len(wanted) + 1, end_id=-1
    )
    *ours_written, (after, _) = list(response)
    wrong = sum(a != b for a, b in zip(ours_written, wanted, strict=True)) + (after != "large")
    return [writer for writer, _ in wanted], wrong, apart if math.isfinite(apart) else math.inf
