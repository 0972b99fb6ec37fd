"""`python -m perf.traces`: records who wrote each token, for replays with `python -m perf.serving --trace`.

Runs problems of the demo set through the offline engine with a policy and writes one trace per response, see
`perf.traces.trace`. Example:

    python -m perf.traces --policy r2r --output r2r.jsonl
    python -m perf.serving --profile configs/profiles/r2r_qwen3_0.6b_32b.yaml --trace r2r.jsonl --inflight 4
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from perf.command import run
from perf.traces.trace import Trace, agreement, from_routing, moves, write_traces
from tokenrouter.offline import TokenRouter
from tokenrouter.request import RequestFields
from tools.demo_models.task import load_problems
from tools.evaluate import parse_setting
from tools.targets import target_file


def record(
    router: TokenRouter, prompts: list[str], policy: str, params: dict[str, Any], max_tokens: int
) -> list[Trace]:
    """One trace per prompt."""
    text = json.dumps(params) if params else None
    requests = [
        RequestFields(text_input=prompt, max_tokens=max_tokens, seed=seed, policy=policy, policy_params=text)
        for seed, prompt in enumerate(prompts)
    ]
    traces = []
    for prompt, result in zip(prompts, router.generate(requests), strict=True):
        runs = [{"model": run.model, "start": run.start, "end": run.end} for run in result.runs]
        traces.append(from_routing({"runs": runs, **result.totals()}, prompt))
    return traces


def summary(traces: list[Trace], first: str) -> str:
    """Who wrote how much, and how many of the recorded hand-offs a replay makes."""
    writers = [writer for trace in traces for writer in trace.writers]
    shares = ", ".join(f"{name} {writers.count(name) / len(writers):.1%}" for name in dict.fromkeys(writers))
    recorded = sum(trace.handoffs for trace in traces)
    replayed = sum(
        count for trace in traces for (source, target, _), count in moves(trace, first).items() if source != target
    )
    share = agreement(traces)
    agreed = "" if share is None else f"; the large model wrote {share:.1%} of the discarded tokens itself"
    kind = "emulated, " if any(trace.emulated for trace in traces) else ""
    return (
        f"{kind}{len(writers)} tokens: {shares}; {recorded} hand-offs, a replay over and over makes {replayed}{agreed}"
    )


def main(
    output: Annotated[Path, typer.Option(help="Where to (JSON lines).", callback=target_file())],
    policy: Annotated[str, typer.Option(help="policy or policy:key=value,...")] = "r2r",
    problems: Annotated[Path, typer.Option(help="JSON lines with prompt and answer.")] = Path(
        "configs/demo/problems.jsonl"
    ),
    count: Annotated[int, typer.Option(help="Only the first so many problems.")] = 32,
    model_repository: Annotated[Path, typer.Option(help="Model repository.")] = Path("model_repository"),
    entry: Annotated[str, typer.Option(help="Entry model.")] = "tokenrouter",
    max_tokens: Annotated[int, typer.Option(help="Most tokens of a response.")] = 160,
) -> None:
    setting = parse_setting(policy)
    prompts = [problem.prompt for problem in load_problems(problems)[:count]]
    with TokenRouter.from_repository(model_repository, entry=entry) as router:
        traces = record(router, prompts, setting.policy, setting.params, max_tokens)
        first = router.models[0]
    write_traces(traces, output)
    print(f"{output}: {len(traces)} responses, {summary(traces, first)}")


if __name__ == "__main__":
    run(main, ValueError)
