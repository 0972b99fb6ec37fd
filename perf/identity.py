"""`python -m perf.identity`: whether speculative hand-off writes what plain routing writes, on the demo problems.

Starts a server of the repository, sends every problem twice per policy, greedy and sampled, with `speculation` off and
on, and compares token ids, text, `routing` and finish reason to the bit, log-probabilities within rounding. Exit code 1
if a response differs. Example:

    python -m perf.identity --problems 100 --policy r2r citer rstitch:threshold=0.02 random:p=0.35
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from perf.command import run
from perf.rows import Columns, Row, report, shown, table
from tools.demo_models.task import load_problems
from tools.evaluate import Setting, parse_setting
from tools.load import ClosedLoop, request_bytes
from tools.targets import target_file
from tools.tritonserver.server import TritonServer

POLICIES = [
    "r2r:threshold=0.3",
    "citer",
    "collm",
    "random:p=0.35",
    "rstitch:threshold=0.02",
    "rstitch:threshold=0.1",
    'markov:routing={"small":{"small":0.6,"large":0.4},"large":{"small":0.7,"large":0.3}},commit={"large":{"small":1}}',
]
MODES: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 0.8}}
OUTPUTS = ("text_output", "output_ids", "finish_reason", "routing", "output_log_probs")
_ROUNDING = 1e-3
_COLUMNS: Columns = {
    "policy": ("policy", ""),
    "mode": ("mode", ""),
    "responses": ("responses", ".0f"),
    "identical": ("identical", ".0f"),
    "agreement": ("agreement", ".1%"),
    "plain tokens/s": ("plain_tokens_per_second", ".0f"),
    "speculative": ("speculative_tokens_per_second", ".0f"),
    "log-probabilities differ by": ("log_prob_difference", ".1e"),
}


@dataclass
class Response:
    """One response, put together from its messages."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    runs: list[dict[str, Any]] = field(default_factory=list)
    totals: dict[str, Any] = field(default_factory=dict)
    log_probs: list[float] = field(default_factory=list)

    def add(self, tensors: Any) -> None:
        """One more message."""
        self.ids += tensors["output_ids"].reshape(-1).tolist() if "output_ids" in tensors else []
        self.text += tensors["text_output"].reshape(-1)[0].decode()
        self.log_probs += tensors["output_log_probs"].reshape(-1).tolist() if "output_log_probs" in tensors else []
        if "finish_reason" in tensors:
            self.finish_reason = tensors["finish_reason"].reshape(-1)[0].decode()
        routing = json.loads(tensors["routing"].reshape(-1)[0])
        self.runs += routing.pop("runs")
        self.totals |= routing

    def exact(self) -> tuple[Any, ...]:
        """What has to be equal to the bit."""
        writers = [(run["model"], position) for run in self.runs for position in range(run["start"], run["end"])]
        return self.ids, self.text, self.finish_reason, writers, self.totals

    def difference(self, other: Response) -> float:
        """Of log-probabilities, the largest; infinite if there are not as many."""
        if len(self.log_probs) != len(other.log_probs):
            return math.inf
        return max((abs(a - b) for a, b in zip(self.log_probs, other.log_probs, strict=True)), default=0.0)


def responses(
    url: str, prompts: Sequence[str], fields: dict[str, Any], *, max_tokens: int, inflight: int
) -> tuple[list[Response], float]:
    """All responses, and tokens per second."""

    def request(number: int) -> bytes | None:
        if number >= len(prompts):
            return None
        return request_bytes(
            "tokenrouter",
            prompts[number],
            max_tokens=max_tokens,
            request_id=str(number),
            outputs=OUTPUTS,
            seed=number,
            return_routing=True,
            return_log_probs=True,
            **fields,
        )

    found, began_s = [Response() for _ in prompts], time.perf_counter()
    with ClosedLoop(url, request, inflight, keep=True) as loop:
        for _ in loop.ticks():
            if loop.over:
                break
        took_s = time.perf_counter() - began_s
        for number, _, tensors in loop.messages():
            found[number].add(tensors)
    return found, sum(len(each.ids) for each in found) / took_s


def compared(url: str, prompts: Sequence[str], setting: Setting, mode: str, **options: int) -> Row:
    """A row for one policy and way of sampling."""
    fields = {"policy": setting.policy, "policy_params": json.dumps(setting.params), **MODES[mode]}
    plain, plain_speed = responses(url, prompts, {**fields, "speculation": False}, **options)
    ahead, ahead_speed = responses(url, prompts, {**fields, "speculation": True}, **options)
    pairs = list(zip(plain, ahead, strict=True))
    differences = [a.difference(b) for a, b in pairs]
    same = [a.exact() == b.exact() and gap <= _ROUNDING for (a, b), gap in zip(pairs, differences, strict=True)]
    discards = sum(each.totals.get("discards", 0) for each in plain)
    agreed = sum(each.totals.get("agreed", 0) for each in plain)
    return {
        "policy": setting.label,
        "mode": mode,
        "responses": len(pairs),
        "identical": sum(same),
        "agreement": agreed / discards if discards else "",
        "plain_tokens_per_second": plain_speed,
        "speculative_tokens_per_second": ahead_speed,
        "log_prob_difference": max(differences),
    }


def main(
    policy: Annotated[list[str], typer.Option(help="policy or policy:key=value,..., several")] = POLICIES,
    problems: Annotated[int, typer.Option(min=1, help="How many.")] = 100,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a response.")] = 96,
    inflight: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    model_repository: Annotated[Path, typer.Option(help="Model repository.")] = Path("model_repository"),
    source: Annotated[Path, typer.Option("--from", help="JSON lines with prompts.")] = Path(
        "configs/demo/problems.jsonl"
    ),
    csv: Annotated[Path | None, typer.Option(help="Write the rows there too.", callback=target_file())] = None,
) -> None:
    settings = [parse_setting(text) for text in policy]
    prompts = [problem.prompt for problem in load_problems(source)[:problems]]
    with TritonServer(model_repository) as server:
        rows = [
            compared(server.grpc_url, prompts, setting, mode, max_tokens=max_tokens, inflight=inflight)
            for setting in settings
            for mode in MODES
        ]
    report(rows, table(shown(row, _COLUMNS) for row in rows), csv_file=csv)
    if any(row["identical"] != row["responses"] for row in rows):
        raise typer.Exit(1)


if __name__ == "__main__":
    run(main, ValueError)
