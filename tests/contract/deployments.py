"""Copies of the demo deployment whose models run on TensorRT-LLM, or on the torch engine to compare with."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.contract.double import use_double
from tokenrouter.offline import TokenRouter
from tools.demo_models.task import load_problems

use_double()

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "model_repository"
PROMPTS = [problem.prompt for problem in load_problems(ROOT / "configs/demo/problems.jsonl")[:4]]

ALIASES = {"larger": "large", "small_citer": "small", "small_collm": "small"}

# The demo's tokenizer has a token for every id; these four mean nothing.
HANDOFF_IDS = [258, 259, 260, 261]
BLOCK = 16

TENSORRT_LLM: dict[str, Any] = {
    "engine": "tensorrt_llm",
    "dtype": "float32",
    "max_batch_size": 16,
    "max_num_tokens": 1024,
    "max_seq_len": 1024,
    "handoff_ids": HANDOFF_IDS,
    "kv_cache_config": {"tokens_per_block": BLOCK, "max_tokens": 16384},
}
TORCH: dict[str, Any] = {
    "engine": "torch",
    "dtype": "float32",
    "max_batch_size": 16,
    "max_num_tokens": 1024,
    "max_seq_len": 1024,
    "kv_cache_config": {"tokens_per_block": BLOCK, "max_tokens": 16384},
}


def deployment(
    folder: Path,
    policy: str = "single",
    params: Mapping[str, Any] | None = None,
    *,
    models: Sequence[str] = ("small", "large"),
    engine: Mapping[str, Any] = TENSORRT_LLM,
    per_model: Mapping[str, Mapping[str, Any]] | None = None,
    **parameters: str,
) -> Path:
    """A repository with the demo's checkpoints, some under other names, too (`ALIASES`).

    Args:
        folder: where to write it.
        policy: the deployment's policy.
        params: its parameters.
        models: the deployment's models.
        engine: model.yaml of every model.
        per_model: changes of single keys of it, by model.
        parameters: further parameters of the entry model.
    """
    shutil.copytree(DEMO / "tokenrouter", folder / "tokenrouter")
    add_entry(folder, "tokenrouter", policy, params, models=models, **parameters)
    for name in models:
        source = DEMO / ALIASES.get(name, name)
        version = folder / name / "1"
        version.mkdir(parents=True)
        text = (source / "config.pbtxt").read_text()
        (folder / name / "config.pbtxt").write_text(re.sub(r'^name: ".*"$', f'name: "{name}"', text, flags=re.M))
        options = {**engine, "model": str(source / "1"), **(per_model or {}).get(name, {})}
        (version / "model.yaml").write_text(yaml.safe_dump(options))
    return folder


def add_entry(
    folder: Path,
    name: str,
    policy: str,
    params: Mapping[str, Any] | None = None,
    *,
    models: Sequence[str],
    **parameters: str,
) -> None:
    """An entry model; routers are those of the first one."""
    (folder / name / "1").mkdir(parents=True, exist_ok=True)
    text = (DEMO / "tokenrouter" / "config.pbtxt").read_text()
    given = {"policy": policy, "policy_params": json.dumps(params or {}), "models": ",".join(models), **parameters}
    text = re.sub(r'^name: ".*"$', f'name: "{name}"', text, flags=re.M)
    for key, value in given.items():
        text = re.sub(rf'^parameters {{ key: "{key}".*\n', "", text, flags=re.M)
        text += f'parameters {{ key: "{key}", value: {{ string_value: {json.dumps(value)} }} }}\n'
    (folder / name / "config.pbtxt").write_text(text)


def engine_of(router: TokenRouter, model: str = "small") -> Any:
    return router._driver.subservers[model].engine


def assert_idle(router: TokenRouter) -> None:
    assert engine_of(router).blocks_leased == engine_of(router).blocks_used == 0
