"""A short routed generation through the adapter: two models, one policy, no server."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tokenrouter.engines.tensorrt_llm.workers import worker_pids
from tokenrouter.errors import RouterError
from tokenrouter.offline import TokenRouter
from tokenrouter.response import Result
from tools.build_repository.build import write_repository
from tools.build_repository.check import checked
from tools.build_repository.spec import DeploymentSpec

NAMES = ("small", "large")
_LONGEST = 1024
SEED = 7
MOST_NOTICED_S = 5.0
"""Within so long the end of a worker has to be told to whoever waits."""


@dataclass(frozen=True)
class Settings:
    """What to run.

    Attributes:
        models: checkpoint folders, small first; one folder stands for both.
        prompt: text.
        tokens: length of the response.
        gpu: index of the GPU that both models share.
        kv_tokens: tokens that each model's KV cache holds.
        handoff_ids: see `engines.tensorrt_llm.config`; None for the ids that the tokenizers leave unused.
    """

    models: tuple[Path, ...]
    prompt: str = "The capital of France is"
    tokens: int = 20
    gpu: int = 0
    kv_tokens: int = 4096
    handoff_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        routed: the response that both models wrote.
        alone: the small model's own response.
        recomputed: tokens whose KV should have been reused and was not, over both models.
        reused: tokens whose KV was reused.
        died: how the death of a worker showed, and after how many seconds; None if no worker has a process of its own.
    """

    routed: Result
    alone: Result
    recomputed: int
    reused: int
    died: tuple[str, float] | None = None

    def problems(self, settings: Settings) -> list[str]:
        """What is not as it should be."""
        found = []
        if len(self.routed.tokens) != settings.tokens:
            found.append(f"{len(self.routed.tokens)} tokens instead of {settings.tokens}")
        if not self.routed.handoffs or not all(self.routed.tokens_by_model.get(name) for name in NAMES):
            found.append(f"not both models wrote: {self.routed.tokens_by_model}")
        if self.recomputed:
            found.append(f"KV of {self.recomputed} tokens was not found again (reused: {self.reused})")
        if len(set(settings.models)) == 1 and self.routed.tokens != self.alone.tokens:
            found.append("two copies of one model wrote other tokens than it writes alone (expected if logits tie)")
        if self.died is not None and not (self.died[0] and self.died[1] < MOST_NOTICED_S):
            found.append(f"a worker was killed, and after {self.died[1]:.1f} s nobody had noticed")
        return found


def generate(settings: Settings) -> Outcome:
    """Loads both models, runs one routed response and the same without routing, and then kills a worker.

    Raises:
        RouterError: a model does not load, or a request fails.
    """
    with tempfile.TemporaryDirectory(prefix="tokenrouter-check-") as folder:
        root = Path(folder)
        write_repository(checked(_spec(settings), root), root)
        with TokenRouter.from_repository(root) as router:
            prompt, fields = [settings.prompt], _fields(settings.tokens)
            alone = router.generate(prompt, policy="single", policy_params='{"model": "small"}', **fields)[0]
            routed = router.generate(prompt, **fields)[0]
            caches = [each.cache for each in router.statistics.values() if each.cache is not None]
            recomputed = sum(cache.recomputed_tokens for cache in caches)
            reused = sum(cache.cached_tokens for cache in caches)
            died = _killed(router, prompt[0]) if worker_pids() else None
    return Outcome(routed, alone, recomputed, reused, died)


def _killed(router: TokenRouter, prompt: str) -> tuple[str, float]:
    """What is told when a worker dies in the middle of a response, and how many seconds later."""
    updates = router.stream(prompt, **_fields(_LONGEST // 2))
    next(updates)
    for pid in worker_pids():
        os.kill(pid, signal.SIGKILL)
    started = time.monotonic()
    try:
        for _ in updates:
            if time.monotonic() - started > MOST_NOTICED_S:
                break
    except RouterError as exc:
        return str(exc), time.monotonic() - started
    return "", time.monotonic() - started


def _fields(tokens: int) -> dict[str, Any]:
    return {"max_tokens": tokens, "min_tokens": tokens, "seed": SEED}


def _spec(settings: Settings) -> DeploymentSpec:
    folders: Sequence[Path] = settings.models if len(settings.models) > 1 else settings.models * len(NAMES)
    options: dict[str, Any] = {
        "max_batch_size": 4,
        "max_num_tokens": 1024,
        "max_seq_len": _LONGEST,
        "kv_cache_config": {"max_tokens": settings.kv_tokens},
        "cuda_graph_config": None,
        "torch_compile_config": None,
    }
    if settings.handoff_ids is not None:
        options["handoff_ids"] = list(settings.handoff_ids)
    model = {"engine": "tensorrt_llm", "gpus": [settings.gpu], "options": options}
    spec = {
        # Leaves the small model by a forced token, and comes back after one token.
        "entry": {"policy": "random", "policy_params": {"p": 0.4}, "selectable_policies": ["single"]},
        "models": {
            name: {**model, "checkpoint": str(path.resolve())} for name, path in zip(NAMES, folders, strict=True)
        },
        "kv_budget": {"gpu_memory_gib": 1024.0, "share": 1.0, "reserve_gib": 0.0},
    }
    return msgspec.convert(spec, DeploymentSpec)
