"""`python -m perf.ablation`: what each design decision brings, by taking it back alone.

    python -m perf.ablation                        # emulated engines, R2R, the agentic workload
    python -m perf.ablation --engine torch         # the demo pair, real tokens

Rows: everything; without delayed batching; without asynchronous execution (two kinds of lock-step in one process,
without any server); KV dropped at every hand-off, so each visit begins with a prefill; the router in another process,
with the model's own logits and with as many as Qwen3 has. The last three run through the real server, with a policy
around the policy (`perf/ablation/policies.py`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from perf.ablation.policies import OUTSIDE, REPREFILL
from perf.ablation.router_process import router_process
from perf.compare import client, demo
from perf.compare.cells import BY_NAME, Cell
from perf.compare.emulated import EmulatedSetting
from perf.compare.measure import Setting, measure, tuned_table
from perf.compare.results import Results
from perf.compare.summary import Summary, summarise
from perf.compare.thresholds import Tuning
from perf.compare.workloads import load_reference
from tokenrouter.errors import RouterError
from tools.build_repository.build import built_deployment, write_repository
from tools.dtmc.errors import DtmcError
from tools.progress import LateProgress
from tools.tritonserver.installation import LaunchError
from tools.tritonserver.server import TritonServer

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROOT = Path(__file__).resolve().parents[2]
QWEN3_VOCABULARY = 151_936

_TIMES = ("ttft_p50_ms", "itl_mean_ms", "e2e_p50_ms")
BASE = {"tokenrouter": "everything", "eager": "- delayed batching", "lock-step": "- asynchronous (lock-step)",
        "step-sync": "- asynchronous (step-sync)"}  # fmt: skip
WRAPPED: dict[str, tuple[str, int]] = {
    "- retained KV (prefill at every visit)": (REPREFILL, 0),
    "- local router (in another process)": (OUTSIDE, 0),
    f"- local router, {QWEN3_VOCABULARY:,} logits a row": (OUTSIDE, QWEN3_VOCABULARY),
}


def wrap(repository: Path, policy: str, *, address: Path, width: int) -> tuple[str, dict[str, Any]]:
    """Puts a policy of `baselines.ablation` around the deployment's; returns name and parameters of that one."""
    deployment = built_deployment(repository)
    inner = deployment.entry
    outer = {"policy": inner.policy, "params": inner.policy_params, "address": str(address), "width": width}
    write_repository(replace(deployment, entry=replace(inner, policy=policy, policy_params=outer)), repository)
    return inner.policy, inner.policy_params


def wrapped(setting: Setting, tuning: Tuning, cells: list[Cell], name: str) -> Iterator[tuple[Cell, Summary]]:
    """The tuned server with a policy around the policy."""
    policy, width = WRAPPED[name]
    profile, kind = setting.profile(cells[0]), setting.kind(cells[0])
    numbers = [cell.in_flight for cell in cells]
    thresholds = tuned_table(tuning, kind, profile, numbers)
    with tempfile.TemporaryDirectory(prefix="tokenrouter-ablation-") as folder, ExitStack() as stack:
        repository = setting.repository(Path(folder) / "models", cells[0], thresholds, max(numbers))
        address = Path(folder) / "router.sock"
        inner, params = wrap(repository, policy, address=address, width=width)
        if policy == OUTSIDE:
            stack.enter_context(router_process(address, repository, profile.names, inner, params))
        # Where the models' processes find the policy.
        server = stack.enter_context(TritonServer(repository, env={"PYTHONPATH": str(ROOT)}))
        for cell in cells:
            yield cell, summarise(client.run(server.grpc_url, "tokenrouter", setting.load(cell)))


def table_of(results: Results, engine: str) -> Table:
    """Tokens per second, and what is left of everything."""
    table = Table("policy", "n", "row", "tokens/s", "of everything", "first token, p50 ms", "between tokens, p50 ms",
                  "whole response, p50 ms", title=engine)  # fmt: skip
    for cell in results.cells():
        whole = results.number(cell, "everything", "tokens_per_second")
        for name in (*BASE.values(), *WRAPPED):
            if results.row(cell, name):
                rate = results.number(cell, name, "tokens_per_second")
                times = [f"{results.number(cell, name, f'{what}_p50_ms'):.1f}" for what in ("ttft", "itl", "e2e")]
                table.add_row(cell.policy, str(cell.in_flight), name, f"{rate:.1f}", f"{rate / whole:.0%}", *times)
    return table


def markdown(results: Results) -> str:
    """The same as a Markdown table."""
    head = "| policy | in flight | row | tokens/s | of everything | first / between / whole, ms |"
    lines = [head, "|---|---|---|---|---|---|"]
    for cell in results.cells():
        whole = results.number(cell, "everything", "tokens_per_second")
        for name in (*BASE.values(), *WRAPPED):
            if results.row(cell, name):
                rate = results.number(cell, name, "tokens_per_second")
                times = " / ".join(f"{results.number(cell, name, column):.0f}" for column in _TIMES)
                lines.append(
                    f"| {cell.policy} | {cell.in_flight} | {name} | {rate:.1f} | {rate / whole:.0%} | {times} |"
                )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = argparse.ArgumentParser(prog="python -m perf.ablation", description=(__doc__ or "").partition("\n\n")[2])
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    parse.add_argument("--engine", choices=["emulated", "torch"], default="emulated")
    parse.add_argument("--policy", default="r2r")
    parse.add_argument("--workload", default="agentic", help="emulated")
    parse.add_argument("--inflight", nargs="+", type=int, default=[4, 16], help="responses that run at once")
    parse.add_argument("--scale", type=int, default=64, help="emulated: prompts and responses are so much shorter")
    parse.add_argument("--seconds", type=float, default=4.0, help="least length of a window")
    parse.add_argument("--csv", type=Path, help="default: perf/results/ablation_ENGINE.csv")
    parse.add_argument("--markdown", action="store_true", help="print a Markdown table")
    parse.add_argument("--report", action="store_true", help="measure nothing; the table of the CSV")
    return parse


def main(arguments: list[str] | None = None) -> None:
    """Measures, writes and prints."""
    args = parser().parse_args(arguments)
    path = args.csv or RESULTS / f"ablation_{args.engine}.csv"
    results = Results.load(path)
    if not args.report:
        try:
            _measure(args, results, path)
        except (DtmcError, LaunchError, RouterError, RuntimeError) as exc:
            sys.exit(f"error: {exc}")
    if args.markdown:
        print(markdown(results))
    else:
        Console(width=None if sys.stdout.isatty() else 140).print(table_of(results, args.engine))


def _measure(args: argparse.Namespace, results: Results, path: Path) -> None:
    setting: Setting
    if args.engine == "emulated":
        setting = EmulatedSetting(load_reference(), scale=args.scale, warm_up_s=1.0, seconds=args.seconds)
    else:
        setting = demo.DemoSetting(most=max(args.inflight), warm_up_s=1.0, seconds=args.seconds)
    workload = args.workload if args.engine == "emulated" else demo.WORKLOAD
    cells = [Cell(args.policy, workload, n) for n in args.inflight]
    tuning = Tuning()
    with LateProgress() as report:
        systems = [BY_NAME[name] for name in BASE]
        for cell, system, summary, _ in measure(setting, tuning, cells, systems, lambda text: report(text, 0.0)):
            results.add(cell, BASE[system.name], {"engine": args.engine, **summary.flat()})
            results.save(path)
        for done, name in enumerate(WRAPPED):
            report(name, 0.4 + 0.6 * done / len(WRAPPED))
            for cell, summary in wrapped(setting, tuning, cells, name):
                results.add(cell, name, {"engine": args.engine, **summary.flat()})
                results.save(path)


if __name__ == "__main__":
    main()
