"""R2R's strategies: one of theirs per request, ours for all requests in batches of changing composition."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from perf.reference_routers.r2r import (
    SOURCE,
    Authors,
    Inputs,
    Sizes,
    arguments,
    compare_classes,
    features_of,
    load,
    policy,
    saved,
    small_model,
    their_model,
    their_probability,
)
from perf.reference_routers.rows import Finding, decisions
from tokenrouter.policies.checkpoints.r2r import CLASSES

# Strategy -> settings, in the words that both share; `immediate` and `entropy` look at one position.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "entropy": [{}, {"entropy_threshold": 1.5}],
    "immediate": [{}, {"aleatoric_threshold": 2.2, "entropy_threshold": 0.5, "epistemic_threshold": 0.05}],
    "momentum": [
        {},
        {"aleatoric_threshold": 2.255, "momentum_factor": 0.5},
        {"aleatoric_threshold": 2.26, "quick_to_ref_threshold": 0.45, "ref_to_quick_threshold": 0.55},
    ],
    "rolling": [{}, {"aleatoric_threshold": 2.26, "entropy_threshold": 0.5, "window_size": 5}],
    "duo_rolling": [{}, {"aleatoric_threshold": 2.26, "window_size": 5}],
}
# What their rolling rule on a network can feed: it names its input by one word.
ROLLING = ("LogitsClassifier", "HiddenStatesClassifier", "HiddenStatesClassifierWithLMHead")
_REQUESTS, _POSITIONS = 40, 100


def compare(source: Path, folder: Path) -> Iterator[Finding]:
    """Classes and strategies; files go into `folder`."""
    authors, sizes = load(source), Sizes()
    table = small_model(folder / "small", sizes)
    yield from compare_classes(authors, sizes, table, folder)
    yield from compare_strategies(authors, sizes, table, folder)


def compare_strategies(authors: Authors, sizes: Sizes, table: Tensor, folder: Path) -> Iterator[Finding]:
    """Every strategy with several settings."""
    inputs = Inputs.drawn(sizes, _REQUESTS, _POSITIONS, seed=1)
    for name, variants in SETTINGS.items():
        for settings in variants:
            ours = policy(folder, strategy=name, **settings)
            theirs = make(authors, name, settings)
            yield _found(authors, name, _shown(settings), ours, theirs, inputs)
    for name in ROLLING:
        path, threshold = _file(authors, name, sizes, folder)
        for settings in ({}, {"window_size": 5}):
            given = {"model_path": str(path), "threshold": threshold, "device": "cpu", **settings}
            ours = policy(path, table, strategy="neural_rolling", threshold=threshold, **settings)
            shown = _shown({"class": name, **settings})
            yield _found(authors, "neural_rolling", shown, ours, make(authors, "neural_rolling", given), inputs)
    for name in (name for name, kind in CLASSES.items() if kind.window):
        path, threshold = _file(authors, name, sizes, folder)
        given = {"model_path": str(path), "threshold": threshold, "device": "cpu"}
        ours = policy(path, table, threshold=threshold)
        shown = _shown({"class": name})
        yield _found(authors, "neural_multi_input", shown, ours, make(authors, "neural_multi_input", given), inputs)


def their_decisions(authors: Authors, make: Callable[[], Any], inputs: Inputs) -> Tensor:
    """[R, T] bool: a strategy of its own for every request, asked position by position."""
    count, length = inputs.tokens.shape
    leaves = torch.zeros(count, length, dtype=torch.bool)
    for i in range(count):
        strategy = make()
        for position in range(length):
            choice = strategy.route(inputs.outputs(authors, i, position))
            leaves[i, position] = choice == "reference" if isinstance(choice, str) else bool(choice[0])
    return leaves


def _found(authors: Authors, name: str, shown: str, ours: Any, theirs: Callable[[], Any], inputs: Inputs) -> Finding:
    wanted = their_decisions(authors, theirs, inputs)
    got = decisions(ours, inputs.logits, inputs.hidden, inputs.tokens)
    share = wanted.float().mean()
    shown = ", ".join(filter(None, [shown, f"{share:.0%} large"]))
    return Finding(SOURCE, f"strategy {name}", shown, wanted.numel(), None, int((got != wanted).sum()))


def make(authors: Authors, name: str, settings: dict[str, Any]) -> Callable[[], Any]:
    """Makes one strategy after the other, of one that has decided nothing yet."""
    with contextlib.redirect_stdout(io.StringIO()):
        fresh = authors.switching.create_switching_strategy(name, **settings)
    return lambda: copy.deepcopy(fresh)


def _file(authors: Authors, name: str, sizes: Sizes, folder: Path) -> tuple[Path, float]:
    """A file for these strategies, and a threshold among its probabilities."""
    path = folder / f"strategy_{name}.pt"
    given = arguments(name, sizes, folder / "small", **({"topk": 10} if "LMHead" in name else {}))
    saved(authors, name, path, threshold=0.5, seed=7, arguments=given)
    in_one_word(path)
    rows = features_of(name, Inputs.drawn(sizes, 4, 50, seed=2), sizes)
    return path, float(their_probability(their_model(authors, path), rows).median())


def in_one_word(path: Path) -> None:
    """Names a file's only input as the strategies with a window read it: by a word and not by a list."""
    content = torch.load(path, weights_only=False)
    (content["common_args"]["input_type"],) = content["common_args"]["input_type"]
    torch.save(content, path)


def _shown(settings: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items())
