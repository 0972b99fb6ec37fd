"""`python -m perf.ablation`: what each design decision brings, by taking it back alone.

    python -m perf.ablation                        # emulated engines, R2R, the agentic workload
    python -m perf.ablation --engine torch         # the demo pair, real tokens

Rows: everything; without delayed batching; without asynchronous execution (two kinds of lock-step in one process,
without any server); KV dropped at every hand-off, so each visit begins with a prefill; the router in another process,
with the model's own logits and with as many as Qwen3 has. The last three run through the real server, with a policy
around the policy (`perf/ablation/policies.py`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec.structs import replace

from perf.ablation.policies import OUTSIDE, REPREFILL
from perf.ablation.router_process import router_process
from perf.command import run
from perf.compare import runs
from perf.compare.__main__ import RESULTS, AsMarkdown, InFlight, OnlyReport, Scale, Seconds
from perf.compare.cells import BY_NAME, Cell
from perf.compare.measure import Setting, measure
from perf.compare.results import Results
from perf.compare.settings import Engine, setting_of
from perf.compare.thresholds import Tuning
from perf.rows import markdown_of, show, table
from tools.build_repository.build import built_deployment, write_repository
from tools.progress import LateProgress
from tools.tritonserver.server import TritonServer

ROOT = Path(__file__).resolve().parents[2]
QWEN3_VOCABULARY = 151_936
_IN_FLIGHT = [4, 16]

BASE = {
    "tokenrouter": "everything",
    "eager": "- delayed batching",
    "lock-step": "- asynchronous (lock-step)",
    "step-sync": "- asynchronous (step-sync)",
}
WRAPPED: dict[str, tuple[str, int]] = {
    "- retained KV (prefill at every visit)": (REPREFILL, 0),
    "- local router (in another process)": (OUTSIDE, 0),
    f"- local router, {QWEN3_VOCABULARY:,} logits a row": (OUTSIDE, QWEN3_VOCABULARY),
}


def wrap(repository: Path, policy: str, *, address: Path, width: int) -> tuple[str, dict[str, Any]]:
    """Puts a policy of `ablation.policies` around the deployment's; returns name and parameters of that one."""
    deployment = built_deployment(repository)
    inner = deployment.entry
    outer = {"policy": inner.policy, "params": inner.policy_params, "address": str(address), "width": width}
    write_repository(replace(deployment, entry=replace(inner, policy=policy, policy_params=outer)), repository)
    return inner.policy, inner.policy_params


def wrapped(setting: Setting, tuning: Tuning, cells: list[Cell], name: str) -> Iterator[tuple[Cell, dict[str, float]]]:
    """The tuned server with a policy around the policy."""
    policy, width = WRAPPED[name]
    profile = setting.profile(cells[0])
    numbers = [cell.in_flight for cell in cells]
    thresholds = tuning.table(setting.kind(cells[0]), profile, numbers)
    with tempfile.TemporaryDirectory(prefix="tokenrouter-ablation-") as folder, ExitStack() as stack:
        repository = setting.repository(Path(folder) / "models", cells[0], thresholds, max(numbers))
        address = Path(folder) / "router.sock"
        inner, params = wrap(repository, policy, address=address, width=width)
        if policy == OUTSIDE:
            stack.enter_context(router_process(address, repository, profile.names, inner, params))
        # Where the models' processes find the policy.
        server = stack.enter_context(TritonServer(repository, env={"PYTHONPATH": str(ROOT)}))
        for cell in cells:
            yield cell, runs.summarise(runs.served(server.grpc_url, "tokenrouter", setting.load(cell)))


def rows(results: Results) -> list[dict[str, str]]:
    """By heading: tokens per second, what is left of everything, and latencies (p50, mean and p50)."""
    found = []
    for cell in results.cells():
        for name in (*BASE.values(), *WRAPPED):
            if results.row(cell, name):
                rate = results.number(cell, name)
                times = (results.number(cell, name, column) for column in ("ttft_p50_ms", "itl_mean_ms", "e2e_p50_ms"))
                found.append(
                    {
                        "policy": cell.policy,
                        "in flight": str(cell.in_flight),
                        "row": name,
                        "tokens/s": f"{rate:.1f}",
                        "of everything": f"{rate / results.number(cell, 'everything'):.0%}",
                        "first / between / whole, ms": " / ".join(f"{ms:.0f}" for ms in times),
                    }
                )
    return found


def main(
    engine: Engine = Engine.EMULATED,
    policy: str = "r2r",
    workload: Annotated[str, typer.Option(help="Emulated.")] = "agentic",
    inflight: InFlight = _IN_FLIGHT,
    scale: Scale = 64,
    seconds: Seconds = 4.0,
    csv: Annotated[Path | None, typer.Option(help="Default: perf/results/ablation_ENGINE.csv.")] = None,
    as_markdown: AsMarkdown = False,
    only_report: OnlyReport = False,
) -> None:
    path = csv or RESULTS / f"ablation_{engine.value}.csv"
    results = Results.load(path)
    if not only_report:
        setting = setting_of(engine, most=max(inflight), scale=scale, warm_up_s=1.0, seconds=seconds)
        chosen = workload if engine is Engine.EMULATED else setting.workloads[0]
        for cell, name, found in _measured(setting, [Cell(policy, chosen, n) for n in inflight]):
            results.add(cell, name, {"engine": engine.value, **found})
            results.save(path)
    print(markdown_of(rows(results))) if as_markdown else show(table(rows(results), engine.value))


def _measured(setting: Setting, cells: list[Cell]) -> Iterator[tuple[Cell, str, dict[str, float]]]:
    tuning = Tuning()
    with LateProgress() as report:
        systems = [BY_NAME[name] for name in BASE]
        for cell, system, found, _ in measure(setting, tuning, cells, systems, lambda text: report(text, 0.0)):
            yield cell, BASE[system.name], found
        for done, name in enumerate(WRAPPED):
            report(name, 0.4 + 0.6 * done / len(WRAPPED))
            for cell, found in wrapped(setting, tuning, cells, name):
                yield cell, name, found


if __name__ == "__main__":
    run(main, RuntimeError)
