"""`python -m perf.micro.router_cost`: what `route` of each policy takes, beside the torch engine's step before it.

Both models of the demo pair decode a static batch; after each step of the model that the policy asks, `route` runs on
the step's own logits and hidden states, with the rows of live sequences. Medians; the share is that of `route` in the
sum. Rows never move, so a policy that decides on the text (glimprouter) sees growing texts as in a server.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from perf.command import run
from perf.rows import Columns, report, shown, table
from tokenrouter.checkpoint import load_tokenizer
from tokenrouter.engines.base import EngineRow
from tokenrouter.engines.torch.config import TorchEngineConfig
from tokenrouter.engines.torch.engine import TorchEngine
from tokenrouter.messages import PolicySpec, Sampling
from tokenrouter.policies import load_policy
from tokenrouter.policies.base import Policy, PolicyContext, RouteBatch, destination_names
from tokenrouter.repository import Repository
from tokenrouter.subserver.sequence import ModelSequence
from tools.demo_models.task import held_out_problems

SETTINGS: dict[str, dict[str, Any]] = {
    "r2r": {},
    "citer": {},
    "collm": {},
    "rstitch": {},
    "me": {},
    "glimprouter": {"separator": "=", "think_end": "####"},
    "query_level": {"router": "classifier"},
    "random": {},
}
MODELS = ("small", "large")
BATCHES = [1, 16, 64]

_SHOWN: Columns = {
    "policy": ("policy", ""),
    "batch": ("batch", ""),
    "step us": ("step_us", ".0f"),
    "route us": ("route_us", ".0f"),
    "share": ("share", ".1%"),
}


def decoded(
    engine: TorchEngine, tokenizer: Any, policy: Policy, batch: int, steps: int
) -> Iterator[tuple[float, float]]:
    """Seconds of every engine step and of `route` after it: a static batch of demo problems, decoded greedily."""
    rows = [
        _row(engine, tokenizer.encode(problem.prompt).ids, policy, number, steps)
        for number, problem in enumerate(held_out_problems(batch))
    ]
    pending = [list(row.tokens) for row in rows]
    for _ in range(steps):
        began = time.perf_counter()
        result = engine.step([EngineRow(row.handle, tokens) for row, tokens in zip(rows, pending, strict=True)])
        stepped = time.perf_counter()
        tokens = result.logits.argmax(-1)
        asked = RouteBatch(MODELS[0], rows, tokens, result.logits, result.hidden)
        started = time.perf_counter()
        with torch.inference_mode():
            destination_names(policy.route(asked), asked, MODELS)
        yield stepped - began, time.perf_counter() - started
        pending = [[token] for token in tokens.tolist()]
        for row, (token,) in zip(rows, pending, strict=True):
            row.commit(token)
    for row in rows:
        engine.close(row.handle)


def _row(engine: TorchEngine, prompt: list[int], policy: Policy, number: int, steps: int) -> ModelSequence:
    """A sequence as a subserver keeps it."""
    row = ModelSequence(
        model=MODELS[0],
        tokens=prompt,
        prompt_tokens=len(prompt),
        sampling=Sampling(max_tokens=steps, end_ids=(), seed=number, temperature=0.0),
        policy=policy,
        handle=engine.open(kv_tokens=len(prompt) + steps, prompt_tokens=len(prompt)),
    )
    row.arrive(visit=0, source="", state=None)
    policy.receive(row)
    return row


def measure(repository: Path, batches: Sequence[int], steps: int) -> Iterator[dict[str, Any]]:
    """Costs at the small model, where all rules but R-Stitch's and ME's run alone; medians in microseconds."""
    folder = Repository(repository).checkpoint(MODELS[0])
    tokenizer = load_tokenizer(folder)
    engine = TorchEngine.from_folder(folder, TorchEngineConfig(max_batch_size=max(batches), max_num_tokens=8192))
    hidden_size, extras = engine.info.hidden_size, engine.extras(MODELS[0])
    context = PolicyContext(MODELS, str(repository.resolve()), tokenizer=tokenizer, hidden_size=hidden_size, **extras)
    for name, params in SETTINGS.items():
        policy = load_policy(PolicySpec(name, json.dumps(params)), context)
        policy.prepare(MODELS[0])
        for batch in batches:
            # The first step is a prefill, and a few more warm up.
            times = list(decoded(engine, tokenizer, policy, batch, steps))[4:]
            step, route = (statistics.median(column) * 1e6 for column in zip(*times, strict=True))
            yield {"policy": name, "batch": batch, "step_us": step, "route_us": route, "share": route / (route + step)}


def main(
    model_repository: Annotated[Path, typer.Option(help="Model repository of the demo pair.")] = Path(
        "model_repository"
    ),
    batch: Annotated[list[int], typer.Option(help="Batch sizes.")] = BATCHES,
    steps: Annotated[int, typer.Option(min=8, help="Tokens decoded by each sequence.")] = 60,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    rows = list(measure(model_repository, batch, steps))
    report(rows, table(shown(row, _SHOWN) for row in rows), as_json=as_json)


if __name__ == "__main__":
    run(main)
