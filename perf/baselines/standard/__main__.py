"""`python -m perf.baselines.standard`: throughput and latency of the standard-serving baseline alone.

    python -m perf.baselines.standard --profile configs/profiles/r2r_qwen3_0.6b_32b.yaml --inflight 1 4 16
    python -m perf.baselines.standard --repository model_repository --policy rstitch --inflight 4

With --profile engines are *emulated* with the profile's step times; with --repository they are the deployment's own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from perf.baselines.standard import CallFailed, Run, StandardServing
from perf.emulated.deployment import EmulatedDeployment
from tokenrouter.errors import RouterError
from tokenrouter.request import RequestFields
from tools.dtmc.errors import DtmcError
from tools.dtmc.profile import load_profile
from tools.tritonserver.installation import LaunchError

_PERCENTILES = (50, 99)


def requests(arguments: argparse.Namespace, vocab: int) -> Iterator[RequestFields]:
    """Endless requests with random prompts, so that no prompt is in a prefix cache."""
    generator = np.random.default_rng(arguments.seed)
    for index in count():
        yield RequestFields(
            input_ids=generator.integers(vocab, size=arguments.prompt_tokens).tolist(),
            max_tokens=arguments.max_tokens,
            end_id=-1,
            seed=(arguments.seed << 32) + index,
            policy=arguments.policy,
            policy_params=arguments.policy_params,
        )


def row(run: Run) -> dict[str, Any]:
    """Figures of a loop."""
    inter_token = [gap for response in run.responses for gap in response.inter_token_s]
    first = [response.ttft_s for response in run.responses if response.times]
    found: dict[str, Any] = {"in_flight": run.in_flight, "tokens_per_second": run.tokens_per_second}
    for name, values in (("ttft_ms", first), ("itl_ms", inter_token)):
        for percentile in _PERCENTILES:
            found[f"{name}_p{percentile}"] = 1e3 * float(np.percentile(values, percentile)) if values else None
    calls = sum(response.calls for response in run.responses)
    found["calls_per_token"] = calls / max(1, run.tokens)
    found["tokens_run_per_call"] = sum(sum(r.ran.values()) for r in run.responses) / max(1, calls)
    return {**found, **{f"cpu_s_{name}": seconds for name, seconds in run.cpu_s_per_1000_tokens.items()}}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parse = argparse.ArgumentParser(prog="python -m perf.baselines.standard", description=__doc__)
    parse.formatter_class = argparse.RawDescriptionHelpFormatter
    source = parse.add_mutually_exclusive_group(required=True)
    source.add_argument("--profile", type=Path, help="profile (YAML): emulated engines with its step times")
    source.add_argument("--repository", type=Path, help="model repository of a deployment")
    parse.add_argument("--policy", help="default: markov with --profile, the deployment's own with --repository")
    parse.add_argument("--policy-params", help="JSON; default: those of the deployment or the profile")
    parse.add_argument("--inflight", type=int, nargs="+", default=[4], help="responses that run at once")
    parse.add_argument("--seconds", type=float, default=10.0, help="length of a loop")
    parse.add_argument("--prompt-tokens", type=int, default=100)
    parse.add_argument("--max-tokens", type=int, default=512)
    parse.add_argument("--delay-ms", type=float, default=0.0, help="a step waits so long for further calls")
    parse.add_argument("--seed", type=int, default=1)
    parse.add_argument("--json", action="store_true", help="print JSON")
    return parse


@contextlib.contextmanager
def deployment(arguments: argparse.Namespace) -> Iterator[Path]:
    """The deployment's repository; of a profile in a temporary folder."""
    if arguments.repository:
        yield arguments.repository
        return
    with tempfile.TemporaryDirectory(prefix="standard-profile-") as folder:
        profile = load_profile(arguments.profile)
        yield EmulatedDeployment(profile, arguments.policy or "markov", max(arguments.inflight)).write(Path(folder))


def main() -> None:
    """Measures and prints."""
    arguments = parser().parse_args()
    rows = []
    try:
        with deployment(arguments) as repository, StandardServing(repository, delay_ms=arguments.delay_ms) as serving:
            for in_flight in arguments.inflight:
                # A first loop, so that nothing is loaded while the second is measured.
                serving.run(requests(arguments, 256), in_flight=in_flight, seconds=1.0)
                run = serving.run(requests(arguments, 256), in_flight=in_flight, seconds=arguments.seconds)
                rows.append(row(run))
    except (CallFailed, DtmcError, LaunchError, RouterError) as exc:
        sys.exit(f"error: {exc}")
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    emulated = "emulated: step times are the profile's" if arguments.profile else None
    table = Table("figure", *(str(found["in_flight"]) for found in rows), title=emulated)
    for name in list(rows[0])[1:]:
        table.add_row(name, *("-" if found[name] is None else f"{found[name]:.3f}" for found in rows))
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
