"""`python -m tools.evaluate`: accuracy against cost for a list of policies, and a cost-quality plot.

Runs a problem set through the offline engine or a running server, with small-only and large-only as end points. Writes
a CSV (one row per policy and parameters) and a plot: accuracy against the share of tokens by the large model, and
against the time per answer.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from tokenrouter.config.entry import EntryConfig
from tokenrouter.errors import InvalidRequest
from tokenrouter.offline import TokenRouter
from tokenrouter.policies import parse_params, policy_class
from tokenrouter.repository import Repository
from tokenrouter.request import RequestFields
from tools.demo_models.task import Problem, check, load_problems
from tools.errors import CommandError, reported
from tools.load import PROMPTS, ClosedLoop, request_bytes
from tools.progress import LateProgress
from tools.targets import IMAGE_SUFFIXES, target_file

_NEXT_KEY = re.compile(r",(?=\w+=)")
DEFAULT_POLICIES = ("rstitch:threshold=0.02", "rstitch:threshold=0.05", "rstitch:threshold=0.1", "random:p=0.3")


@dataclass(frozen=True)
class Setting:
    """One point of the comparison: a policy with parameters, and how it is called in tables."""

    label: str
    policy: str
    params: dict[str, Any]


@dataclass(frozen=True)
class Answer:
    text: str
    tokens: dict[str, int]
    handoffs: int
    seconds: float


@dataclass(frozen=True)
class Point:
    """One row of the result. `share_large`: of all tokens, not counting those of the first model."""

    label: str
    policy: str
    params: str
    problems: int
    accuracy: float
    share_large: float
    tokens_per_answer: float
    handoffs_per_answer: float
    seconds_per_answer: float


Generate = Callable[[Sequence[Problem], Setting, Callable[[int], None]], list[Answer]]


def parse_setting(text: str) -> Setting:
    """`policy` or `policy:key=value,key=value`; values are JSON, or text if they are not. Lists may hold commas."""
    policy, _, rest = text.partition(":")
    params = dict(item.split("=", 1) for item in _NEXT_KEY.split(rest) if item)
    return Setting(text, policy, {key: _value(value) for key, value in params.items()})


def check_setting(setting: Setting, entry: EntryConfig) -> None:
    """Whether the entry model would take this policy with these parameters, before anything runs.

    Raises:
        CommandError: unknown policy, or unknown or unfit parameters.
    """
    known = entry.selectable | {entry.policy.name}
    if setting.policy not in known:
        raise CommandError(f"--policy {setting.label}: no such policy here; there are {', '.join(sorted(known))}")
    try:
        parse_params(policy_class(setting.policy), json.dumps(setting.params))
    except InvalidRequest as exc:
        raise CommandError(f"--policy {setting.label}: {exc}") from exc


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def end_points(models: Sequence[str]) -> list[Setting]:
    return [Setting(f"{name} only", "single", {"model": name}) for name in models]


def offline_generator(router: TokenRouter, max_tokens: int) -> Generate:
    """All problems at once in this process; the time per answer is wall-clock time by the number of answers."""

    def generate(problems: Sequence[Problem], setting: Setting, progress: Callable[[int], None]) -> list[Answer]:
        started = time.perf_counter()
        params = json.dumps(setting.params)
        requests = [
            RequestFields(
                text_input=problem.prompt, max_tokens=max_tokens, policy=setting.policy, policy_params=params, seed=seed
            )
            for seed, problem in enumerate(problems)
        ]
        results = router.generate(requests, progress=progress)
        seconds = (time.perf_counter() - started) / len(problems)
        return [Answer(result.text, result.tokens_by_model, result.handoffs, seconds) for result in results]

    return generate


def server_generator(url: str, model: str, max_tokens: int, inflight: int) -> Generate:
    """Through a running server, `inflight` requests at a time; the time per answer is a request's latency."""

    def generate(problems: Sequence[Problem], setting: Setting, progress: Callable[[int], None]) -> list[Answer]:
        policy: dict[str, Any] = {"policy": setting.policy, "policy_params": json.dumps(setting.params)}

        def request(seed: int) -> bytes | None:
            if seed >= len(problems):
                return None
            prompt, outputs = problems[seed].prompt, ("text_output", "finish_reason", "routing")
            fields = {"return_routing": True, "seed": seed, **policy}
            return request_bytes(model, prompt, max_tokens=max_tokens, request_id=str(seed), outputs=outputs, **fields)

        texts, ended_s = [""] * len(problems), [0.0] * len(problems)
        totals: list[dict[str, Any]] = [{}] * len(problems)  # of the newest message; the last one has those of all
        with ClosedLoop(url, request, inflight, keep=True) as loop:
            for _ in loop.ticks():
                progress(loop.finished)
                if loop.over:
                    break
            for index, at_s, tensors in loop.messages():
                texts[index] += tensors["text_output"][0].decode()
                totals[index], ended_s[index] = json.loads(tensors["routing"][0]), at_s
        return [
            Answer(text, routing["tokens"], routing["handoffs"], end_s - start_s)
            for text, routing, end_s, start_s in zip(texts, totals, ended_s, loop.sent_s, strict=True)
        ]

    return generate


def measure(problems: Sequence[Problem], setting: Setting, answers: Sequence[Answer], small: str) -> Point:
    count = len(problems)
    pairs = zip(problems, answers, strict=True)
    right = sum(check(problem.prompt, answer.text, problem.answer) for problem, answer in pairs)
    tokens = sum(sum(answer.tokens.values()) for answer in answers)
    by_small = sum(answer.tokens.get(small, 0) for answer in answers)
    return Point(
        label=setting.label,
        policy=setting.policy,
        params=json.dumps(setting.params),
        problems=count,
        accuracy=right / count,
        share_large=1.0 - by_small / tokens,
        tokens_per_answer=tokens / count,
        handoffs_per_answer=sum(answer.handoffs for answer in answers) / count,
        seconds_per_answer=sum(answer.seconds for answer in answers) / count,
    )


def evaluate(problems: Sequence[Problem], settings: Sequence[Setting], generate: Generate, small: str) -> list[Point]:
    """All points, in order."""
    count, points = len(problems), []
    with LateProgress() as report:
        for setting in settings:

            def progress(done: int, label: str = setting.label) -> None:
                report(f"{label}: {done} of {count}", done / count)

            points.append(measure(problems, setting, generate(problems, setting, progress), small))
    return points


def write_csv(points: Sequence[Point], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Point)])
        writer.writeheader()
        writer.writerows(asdict(point) for point in points)


def plot(points: Sequence[Point], path: Path) -> None:
    """Accuracy against the share of large tokens, and against the time per answer; a line per policy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="tight")
    axes = figure.subplots(1, 2, sharey=True)
    policies = list(dict.fromkeys(point.policy for point in points if point.policy != "single"))
    for axis, name in zip(axes, ("share_large", "seconds_per_answer"), strict=True):
        for i, policy in enumerate(policies):
            chosen = sorted((p for p in points if p.policy == policy), key=lambda p: float(getattr(p, name)))
            xs = [float(getattr(p, name)) for p in chosen]
            axis.plot(xs, [p.accuracy for p in chosen], marker="o", color=f"C{i}", label=policy)
        right = max(float(getattr(point, name)) for point in points)
        for point in (p for p in points if p.policy == "single"):
            place = (float(getattr(point, name)), point.accuracy)
            axis.plot(*place, marker="*", markersize=13, color="black")
            side = "right" if place[0] > right / 2 else "left"
            above = place[1] > statistics.median(p.accuracy for p in points)
            axis.annotate(point.label, place, (0, 9 if above else -18), textcoords="offset points", ha=side)
        axis.margins(y=0.12)
        axis.grid(alpha=0.3)
    axes[0].set(xlabel="share of tokens by the large model", ylabel="exact-answer accuracy")
    axes[1].set(xlabel="time per answer (s)")
    axes[0].legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def print_table(points: Sequence[Point]) -> None:
    table = Table("policy", "accuracy", "large tokens", "tokens/answer", "hand-offs/answer", "ms/answer")
    for point in points:
        table.add_row(
            point.label,
            f"{point.accuracy:.1%}",
            f"{point.share_large:.1%}",
            f"{point.tokens_per_answer:.1f}",
            f"{point.handoffs_per_answer:.2f}",
            f"{point.seconds_per_answer * 1e3:.1f}",
        )
    Console(width=110).print(table)


@reported(ValueError)
def main(
    policy: Annotated[list[str] | None, typer.Option(help="policy or policy:key=value,...; may be repeated.")] = None,
    problems: Annotated[Path, typer.Option(help="JSON lines with prompt and answer.")] = PROMPTS,
    count: Annotated[int | None, typer.Option(help="Only the first so many problems.")] = None,
    model_repository: Annotated[Path, typer.Option(help="Model repository.")] = Path("model_repository"),
    entry: Annotated[str, typer.Option(help="Entry model.")] = "tokenrouter",
    url: Annotated[str | None, typer.Option(help="Triton's gRPC endpoint; default: the offline engine.")] = None,
    inflight: Annotated[int, typer.Option(min=1, help="With --url: requests at a time.")] = 8,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 160,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Where to write the points.", callback=target_file())
    ] = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", help="Where to draw them.", callback=target_file(*IMAGE_SUFFIXES))
    ] = None,
) -> None:
    """Accuracy and cost of small only, large only and the given policies on a problem set."""
    chosen = load_problems(problems)[:count]
    config = Repository(model_repository).entry(entry)
    models = config.models
    settings = [*end_points(models), *map(parse_setting, policy or DEFAULT_POLICIES)]
    for setting in settings:
        check_setting(setting, config)
    if url is not None:
        points = evaluate(chosen, settings, server_generator(url, entry, max_tokens, inflight), models[0])
    else:
        with TokenRouter.from_repository(model_repository, entry=entry) as router:
            points = evaluate(chosen, settings, offline_generator(router, max_tokens), models[0])
    print_table(points)
    if csv_file is not None:
        write_csv(points, csv_file)
    if plot_file is not None:
        plot(points, plot_file)


if __name__ == "__main__":
    typer.run(main)
