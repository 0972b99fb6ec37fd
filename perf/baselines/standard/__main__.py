"""`python -m perf.baselines.standard`: throughput and latency of the standard-serving baseline alone.

    python -m perf.baselines.standard --profile configs/profiles/r2r_qwen3_0.6b_32b.yaml --inflight 1 4 16
    python -m perf.baselines.standard --model-repository model_repository --policy rstitch --inflight 4

With --profile engines are *emulated* with the profile's step times; with --model-repository they are the
deployment's own.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from perf.baselines.standard import Run, StandardServing
from perf.command import run
from perf.emulated.deployment import EmulatedDeployment
from perf.load.timing import percentiles_ms
from perf.rows import report, upright
from tokenrouter.request import RequestFields
from tools.dtmc.profile import load_profile
from tools.errors import CommandError

_IN_FLIGHT = [4]


def requests(seed: int, prompt_tokens: int, **fields: object) -> Iterator[RequestFields]:
    """Endless requests with random prompts, so that no prompt is in a prefix cache."""
    generator = np.random.default_rng(seed)
    for index in count():
        prompt = generator.integers(256, size=prompt_tokens).tolist()
        yield RequestFields(input_ids=prompt, end_id=-1, seed=(seed << 32) + index, **fields)  # type: ignore[arg-type]


def row(found: Run) -> dict[str, float]:
    responses = found.responses
    seconds = {
        "ttft_ms": [response.time_to_first_token_s for response in responses],
        "itl_ms": [gap for response in responses for gap in response.gaps_s],
    }
    calls = max(1, sum(response.calls for response in responses))
    figures = {
        "tokens_per_second": found.tokens_per_second,
        **{f"{name}_{part}": ms for name, s in seconds.items() for part, ms in percentiles_ms(s, (50, 99)).items()},
        "calls_per_token": calls / max(1, found.tokens),
        "tokens_run_per_call": sum(sum(response.ran.values()) for response in responses) / calls,
        **{f"cpu_s_{name}": 1e3 * cpu_s / max(1, found.tokens) for name, cpu_s in found.cpu_s.items()},
    }
    return {"in_flight": found.in_flight, **{name: round(value, 3) for name, value in figures.items()}}


def main(
    profile: Annotated[Path | None, typer.Option(help="Profile (YAML): emulated engines with its step times.")] = None,
    model_repository: Annotated[Path | None, typer.Option(help="Model repository of a deployment.")] = None,
    policy: Annotated[str | None, typer.Option(help="Default: markov with --profile, else the deployment's.")] = None,
    policy_params: Annotated[str | None, typer.Option(help="JSON; default: the deployment's or the profile's.")] = None,
    inflight: Annotated[list[int], typer.Option(min=1, help="Responses that run at once.")] = _IN_FLIGHT,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of a loop.")] = 10.0,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 100,
    max_tokens: Annotated[int, typer.Option(min=1)] = 512,
    delay_ms: Annotated[float, typer.Option(min=0.0, help="A step waits so long for further calls.")] = 0.0,
    seed: int = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    rows = []
    with ExitStack() as stack:
        repository = model_repository
        if profile is not None and repository is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="standard-profile-")))
            repository = EmulatedDeployment(load_profile(profile), policy or "markov", max(inflight)).write(folder)
        elif profile is not None or repository is None:
            raise CommandError("give either --profile or --model-repository")
        serving = stack.enter_context(StandardServing(repository, delay_ms=delay_ms))
        fields = {"max_tokens": max_tokens, "policy": policy, "policy_params": policy_params}
        for n in inflight:
            # A first loop, so that nothing is loaded while the second is measured.
            for length_s in (1.0, seconds):
                found = serving.run(requests(seed, prompt_tokens, **fields), in_flight=n, seconds=length_s)
            rows.append(row(found))
    report(rows, upright(rows, "emulated: step times are the profile's" if profile else ""), as_json=as_json)


if __name__ == "__main__":
    run(main, RuntimeError)
