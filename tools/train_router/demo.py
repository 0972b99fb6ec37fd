"""The routers of the demo pair, from nothing: what ``python -m tools.train_router demo`` does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from tokenrouter.offline import TokenRouter
from tokenrouter.policies.checkpoints import DEFAULT_FOLDER, load_router, save_router
from tokenrouter.repository import Repository
from tools.progress import counted
from tools.train_router import thresholds, trainers
from tools.train_router.collect import Collector, Task
from tools.train_router.corpus import Corpus
from tools.train_router.pair import Pair, input_embedding, output_embedding
from tools.train_router.problems import CHECKERS, demo_examples
from tools.train_router.trainers import Trained

PROBLEMS = 4000
ROUTED = ("r2r", "citer", "collm")
# Of tokens by the large model in routed runs; query_level: of prompts. Co-LLM's single row separates less well.
SHARES = {"r2r": 0.05, "citer": 0.05, "collm": 0.1, "query_level": 0.5}
# Away from the seeds of the models' own training problems.
SEED = 20_000
VALIDATION_SEED = 30_000
VALIDATION_PROBLEMS = 100
MAX_TOKENS = 96
ENTRY = "tokenrouter"


def train_all(repository: Path, *, count: int = PROBLEMS) -> Iterator[str]:
    """Trains all four routers and stores them; yields a line of text after each part.

    R2R trains on the large model's answers, CITER and Co-LLM on reference texts, the query classifier on which model
    answers right. Thresholds give the shares in `SHARES`, for the first three in routed runs of other problems.
    """
    demo = Repository(repository)
    pair = Pair(demo.checkpoint("small"), demo.checkpoint("large"), device="cpu")
    folder = repository / DEFAULT_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    watch = _Watch()
    task = Task(demo_examples(count, SEED), CHECKERS["demo"], "large", MAX_TOKENS)
    collector = Collector(pair, task)
    own = collector.answers()
    answers = collector.run(own)
    yield watch.line(describe(answers, "answers"))
    gold = Collector(pair, replace(task, text="gold")).run(own)
    yield watch.line(describe(gold, "gold"))
    trainings: dict[str, Callable[[], Trained]] = {
        "r2r": lambda: trainers.train_r2r(answers, input_embedding(pair.small)),
        "citer": lambda: trainers.train_citer(gold),
        "collm": lambda: trainers.train_collm(gold, output_embedding(pair.small)),
        "query_level": lambda: trainers.train_query(answers, SHARES["query_level"]),
    }
    files = {kind: folder / f"{kind}.safetensors" for kind in trainings}
    for kind, training in trainings.items():
        trained = training()
        save_router(trained.router, files[kind])
        yield watch.line(report(trained, files[kind]))
    prompts = [example.prompt for example in demo_examples(VALIDATION_PROBLEMS, VALIDATION_SEED)]
    for kind in ROUTED:
        file = files[kind]
        value, found = search(repository, ENTRY, file, kind, prompts, SHARES[kind], MAX_TOKENS)
        save_router(replace(load_router(file, kind), threshold=value), file)
        yield watch.line(f"{file}: threshold {value:.6f}, {found:.1%} large tokens")


class _Watch:
    """Adds to a line how long its work took."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def line(self, text: str) -> str:
        began, self._began = self._began, time.monotonic()
        return f"{text}, {self._began - began:.0f} s"


def search(
    repository: Path, entry: str, file: Path, kind: str, prompts: Sequence[str], share: float, max_tokens: int
) -> tuple[float, float]:
    """The threshold that comes nearest to a share of large tokens, and its share.

    Raises:
        ValueError: the kind has no threshold of that sort, or the file lies outside of the repository.
    """
    if kind not in ROUTED:
        raise ValueError(f"{kind} decides once per prompt; its trainer chose the threshold by share of prompts")
    relative = str(file.resolve().relative_to(repository.resolve()))
    with TokenRouter.from_repository(repository, entry=entry) as router, counted(f"threshold of {kind}", 9) as advance:
        run = thresholds.routed_share(router, prompts, kind, relative, max_tokens)

        def measure(value: float) -> float:
            found = run(value)
            advance(1)
            return found

        return thresholds.by_share(measure, share, rising=kind == "citer", steps=9)


def report(trained: Trained, file: Path | str) -> str:
    router, quality = trained.router, trained.quality
    values = sum(tensor.numel() for tensor in router.tensors.values())
    return (
        f"{file}: {router.kind}, {values:,} values, {quality.epochs} epochs, validation loss {quality.loss:.4f}, AUC "
        f"{quality.auc:.4f}; at {router.threshold:.4f} recall {trained.recall:.3f}, {trained.positives:.1%} positive"
    )


def describe(corpus: Corpus, output: Path | str) -> str:
    facts, rows = corpus.facts, len(corpus.target)
    judged = [right for right in facts.small_right if right is not None]
    judged_large = [right for right in facts.large_right if right is not None]
    parts = [
        f"{output}: {len(set(corpus.example.tolist()))} of {len(facts.examples)} texts, {rows} tokens",
        f"{int((corpus.small_token != corpus.target).sum()) / rows:.1%} mismatch",
        f"{int((corpus.divergent == 1).sum())} divergent, {int((corpus.sufficient == 0).sum())} insufficient",
    ]
    if judged and judged_large:
        parts.append(f"right: small {sum(judged) / len(judged):.1%}, large {sum(judged_large) / len(judged_large):.1%}")
    return "; ".join(parts)
