"""`python -m perf.ablation`: what each design decision brings, by taking it back alone.

    python -m perf.ablation                        # emulated engines, R2R, the agentic workload
    python -m perf.ablation --engine torch         # the demo pair, real tokens

Rows: everything; without delayed batching; without asynchronous execution (two kinds of lock-step in one process,
without any server); KV dropped at every hand-off, so each visit begins with a prefill; the router in another process,
with the model's own logits and with as many as Qwen3 has. The last three run through the real server, with a policy
around the policy (`perf/ablation/policies.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from msgspec.structs import replace

from perf.ablation.policies import OUTSIDE, REPREFILL
from perf.ablation.router_process import router_process
from perf.command import run
from perf.compare.__main__ import RESULTS, AsMarkdown, InFlight, OnlyReport, Scale, Seconds
from perf.compare.cells import BY_NAME, Cell, System
from perf.compare.measure import add_rows
from perf.compare.results import Results
from perf.compare.settings import Engine, setting_of
from perf.rows import markdown_of, show, table
from tools.build_repository.build import built_deployment, write_repository
from tools.targets import target_file

QWEN3_VOCABULARY = 151_936
_IN_FLIGHT = [4, 16]


@contextmanager
def wrapped(repository: Path, policy: str, width: int = 0) -> Iterator[None]:
    """Puts a policy of `ablation.policies` around the deployment's, and runs the process in which it decides, if any.

    `width` is that of `policies.OutsideRouter`.
    """
    deployment = built_deployment(repository)
    inner = deployment.entry
    with TemporaryDirectory(prefix="tokenrouter-ablation-") as folder, ExitStack() as stack:
        address = Path(folder) / "router.sock"
        outer = {"policy": inner.policy, "params": inner.policy_params, "address": str(address), "width": width}
        write_repository(replace(deployment, entry=replace(inner, policy=policy, policy_params=outer)), repository)
        if policy == OUTSIDE:
            names = tuple(deployment.models)
            stack.enter_context(router_process(address, repository, names, inner.policy, inner.policy_params))
        yield


def _around(policy: str, width: int = 0) -> System:
    where = f"tuned, in {policy}, width {width}"
    return System(where, where, "this server, a policy around the policy", beside=lambda r: wrapped(r, policy, width))


ROWS = {
    "everything": BY_NAME["tokenrouter"],
    "- delayed batching": BY_NAME["eager"],
    "- asynchronous (lock-step)": BY_NAME["lock-step"],
    "- asynchronous (step-sync)": BY_NAME["step-sync"],
    "- retained KV (prefill at every visit)": _around(REPREFILL),
    "- local router (in another process)": _around(OUTSIDE),
    f"- local router, {QWEN3_VOCABULARY:,} logits a row": _around(OUTSIDE, QWEN3_VOCABULARY),
}


def rows(results: Results) -> list[dict[str, str]]:
    """By heading: tokens per second, what is left of everything, and latencies (p50, mean and p50)."""
    found = []
    for cell in results.cells():
        for name in ROWS:
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
    csv: Annotated[
        Path | None, typer.Option(help="Default: perf/results/ablation_ENGINE.csv.", callback=target_file())
    ] = None,
    as_markdown: AsMarkdown = False,
    only_report: OnlyReport = False,
) -> None:
    path = csv or RESULTS / f"ablation_{engine.value}.csv"
    results = Results.load(path)
    if not only_report:
        setting = setting_of(engine, kept=path.parent, most=max(inflight), scale=scale, warm_up_s=1.0, seconds=seconds)
        chosen = workload if engine is Engine.EMULATED else setting.workloads[0]
        cells = [Cell(policy, chosen, n) for n in inflight]
        add_rows(results, path, setting, cells, ROWS, engine=engine.value)
    print(markdown_of(rows(results))) if as_markdown else show(table(rows(results), engine.value))


if __name__ == "__main__":
    run(main, RuntimeError)
