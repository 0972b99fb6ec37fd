"""Small values of R2R's own code, for a test that needs none of it: every class, and every strategy with a memory.

Weights and inputs are `formulas`. The file has what their code says: by class (and with inputs normalised) the tensors'
shapes and p(divergent) of `rows` rows, by strategy the decisions on two requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from perf.reference_routers import r2r
from perf.reference_routers.formulas import signals, state, written
from perf.reference_routers.r2r import Authors, Inputs, Sizes
from perf.reference_routers.r2r_strategies import in_one_word, make, their_decisions
from tokenrouter.policies.checkpoints.r2r import CLASSES

SIZES = Sizes(hidden=2, vocabulary=16, top=3, dims=(2, 3), expansion=2)
_ROWS, _POSITIONS = 4, 60
_STRATEGIES: list[tuple[str, dict[str, Any]]] = [
    ("entropy", {"entropy_threshold": 1.0}),
    ("immediate", {}),
    ("immediate", {"aleatoric_threshold": 2.25, "entropy_threshold": 0.9, "epistemic_threshold": 0.04}),
    ("momentum", {}),
    ("momentum", {"aleatoric_threshold": 2.28, "momentum_factor": 0.5}),
    ("momentum", {"quick_to_ref_threshold": 0.45, "ref_to_quick_threshold": 0.55}),
    ("rolling", {}),
    ("rolling", {"aleatoric_threshold": 2.28, "entropy_threshold": 0.7, "window_size": 5}),
    ("duo_rolling", {}),
    ("duo_rolling", {"aleatoric_threshold": 2.28, "window_size": 5}),
]


def classes(authors: Authors, folder: Path) -> list[dict[str, Any]]:
    """p(divergent) of `_ROWS` rows by class, with the names and shapes of its tensors."""
    r2r.small_model(folder / "tiny", SIZES)
    found = []
    for name, settings in r2r.variants():
        if settings not in ({}, {"normalize_input": True}):
            continue
        path = folder / f"vector_{name}{len(settings) or ''}.pt"
        given = r2r.arguments(name, SIZES, folder / "tiny", **settings)
        r2r.saved(authors, name, path, threshold=0.5, seed=0, arguments=given)
        path = path.with_name(f"{path.stem}_all.pt")
        content = torch.load(path, weights_only=False)
        shapes = {key: list(tensor.shape) for key, tensor in content["state_dict"].items()}
        content["state_dict"] = state(shapes)
        torch.save(content, path)
        rows = _inputs(1, _ROWS + (SIZES.window - 1) * CLASSES[name].window)
        p = r2r.their_probability(r2r.their_model(authors, path), r2r.features_of(name, rows, SIZES))
        p_shown = [round(value, 7) for value in p.tolist()]
        found.append({"class": name, "init_args": settings, "shapes": shapes, "p": p_shown})
    return found


def _inputs(requests: int, positions: int) -> Inputs:
    return Inputs(*signals(requests, positions, vocabulary=SIZES.vocabulary, hidden=SIZES.hidden))


def strategies(authors: Authors, folder: Path) -> list[dict[str, Any]]:
    """Decisions of two requests, L where the large model writes, by strategy and settings; after `classes`."""
    found = []
    for name, settings in _STRATEGIES:
        leaves = their_decisions(authors, make(authors, name, settings), _inputs(2, _POSITIONS))
        found.append({"params": {"strategy": name, **settings}, "decisions": list(map(written, leaves))})
    for name, kind in CLASSES.items():
        if kind.inputs in (("logits",), ("hidden",)) and kind.outputs != (3,):
            found.append(_neural(authors, name, folder / f"vector_{name}_all.pt"))
    return found


def _neural(authors: Authors, name: str, path: Path) -> dict[str, Any]:
    """The rule with a window over decisions, or over positions where the class takes several."""
    in_one_word(path)
    windowed = CLASSES[name].window
    given, wide = _inputs(2, _POSITIONS), _inputs(1, 200)
    p = r2r.their_probability(r2r.their_model(authors, path), r2r.features_of(name, wide, SIZES))
    settings: dict[str, Any] = {"threshold": round(float(p.median()), 5)}
    strategy = "neural_multi_input" if windowed else "neural_rolling"
    theirs = make(authors, strategy, {"model_path": str(path), "device": "cpu", **settings})
    params = {"strategy": "neural" if windowed else strategy, **settings}
    leaves = their_decisions(authors, theirs, given)
    return {"class": name, "params": params, "decisions": list(map(written, leaves))}


def write(source: Path, folder: Path, path: Path) -> None:
    """All of them as JSON."""
    authors = r2r.load(source)
    parts: dict[str, Sequence[Any]] = {"classes": classes(authors, folder), "strategies": strategies(authors, folder)}
    lines = [f'"{name}": [\n{_lines(entries)}\n]' for name, entries in parts.items()]
    header = f'"sizes": {_json(SIZES)},\n"rows": {_ROWS},\n"positions": {_POSITIONS},\n'
    path.write_text("{\n" + header + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _lines(entries: Sequence[Any]) -> str:
    return ",\n".join(map(_json, entries))


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
