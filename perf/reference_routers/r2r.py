"""thu-nics/R2R: router classes and switching strategies."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from perf.reference_routers import imports
from perf.reference_routers.rows import Finding, decisions, largest
from tokenrouter.messages import PolicySpec
from tokenrouter.policies import load_policy
from tokenrouter.policies.base import Policy, PolicyContext
from tokenrouter.policies.checkpoints.r2r import CLASSES, R2RNetwork, load_r2r

SOURCE = "R2R"
MODELS = ("small", "large")


@dataclass(frozen=True)
class Authors:
    """Their modules."""

    router: Any
    switching: Any
    outputs: Any


@dataclass(frozen=True)
class Sizes:
    """Of a made-up small model and its router."""

    hidden: int = 32
    vocabulary: int = 120
    top: int = 20
    dims: tuple[int, ...] = (24, 48, 24)
    expansion: int = 4
    window: int = 3


def load(source: Path) -> Authors:
    """Their modules, with what is told in the package's text."""
    imports.at(source)
    imports.stand_in("sklearn", "sklearn.metrics", "pandas", "tqdm")
    router = imports.without_refusals(
        "r2r.models.router", source / "r2r/models/router.py", ["HiddenStatesTokenClassifierWithLMHead"]
    )
    for name in ("MultiClassLogitsClassifier", "MultiClassHiddenStatesClassifier"):
        getattr(router, name).forward = _in_order
    router.MultiClassHiddenStatesClassifierWithLMHead.forward = router.HiddenStatesClassifierWithLMHead.forward
    switching = imports.without_refusals(
        "r2r.utils.switching", source / "r2r/utils/switching.py", ["NeuralMultiInputSwitching"]
    )
    return Authors(router, switching, importlib.import_module("r2r.utils.dataclass").ModelOutputs)


def _in_order(self: Any, logits: Any = None, hidden_states: Any = None) -> Any:
    """The `forward` that is added: norm if there is one, projection, backbone, in the order of the other classes."""
    if logits is not None:
        x = logits.softmax(-1) if self.normalize_input else logits
        return self.backbone(self.logits_projection(x))
    x = self.layer_norm(hidden_states) if self.normalize_input else hidden_states
    return self.backbone(self.hidden_states_projection(x))


def inputs_of(name: str) -> list[str]:
    """What a class reads, in their words."""
    words = {"lm_head": "hidden_states", "hidden": "hidden_states"}
    return [words.get(each, each) for each in CLASSES[name].inputs]


def arguments(name: str, sizes: Sizes, folder: Path, **more: Any) -> dict[str, Any]:
    """Of a class's constructor. Windows are side by side, so their classes are told the sum."""
    width = sizes.window if CLASSES[name].window else 1
    given: dict[str, Any] = {"hidden_dims": list(sizes.dims), "expansion_factor": sizes.expansion, **more}
    if "logits" in CLASSES[name].inputs:
        given["logits_size"] = sizes.top * width
    if CLASSES[name].inputs != ("logits",):
        given["hidden_states_size"] = sizes.hidden * width
    if CLASSES[name].window:
        given["neural_window_size"] = sizes.window
    if {"token", "lm_head"} & {*CLASSES[name].inputs}:
        given["pretrained_model_name"] = str(folder)
    return given


def small_model(folder: Path, sizes: Sizes) -> Tensor:
    """Writes a small model, and gives its input embedding [V, H]."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=2 * sizes.hidden,
        num_hidden_layers=1,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    table: Tensor = model.state_dict()["model.embed_tokens.weight"]
    return table


@dataclass(frozen=True)
class Inputs:
    """Of R requests with T positions each: logits [R, T, V], hidden [R, T, H], tokens [R, T]."""

    logits: Tensor
    hidden: Tensor
    tokens: Tensor

    @classmethod
    def drawn(cls, sizes: Sizes, requests: int, positions: int, seed: int) -> Inputs:
        """Logits as of language models: from flat to one that stands out, evidence on either side of 2.275."""
        g = torch.Generator().manual_seed(seed)
        shape = (requests, positions)
        base = torch.randn(*shape, sizes.vocabulary, generator=g)
        steepness = torch.rand(*shape, 1, generator=g) ** 2 * 8 + 0.05
        logits = base * steepness + torch.rand(*shape, 1, generator=g) * 12
        return cls(logits, torch.randn(*shape, sizes.hidden, generator=g), logits.argmax(-1))

    def outputs(self, authors: Authors, request: int, position: int) -> Any:
        """One position of one request, as their strategies take it."""
        one = slice(position, position + 1)
        return authors.outputs(
            logits=self.logits[request, None, one],
            hidden_states=[self.hidden[request, None, one]],
            token=self.tokens[request, None, one],
        )


def saved(authors: Authors, name: str, path: Path, *, threshold: float, seed: int, arguments: dict[str, Any]) -> None:
    """A file of a class with random weights, by their code."""
    with contextlib.redirect_stdout(io.StringIO()):
        model = authors.router.create_classifier(name, **arguments)
        g = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for key, each in model.named_parameters():
                if not key.startswith("token_embeddings"):  # frozen in training
                    each.add_(torch.randn(each.shape, generator=g) * 0.1)
        authors.router.save_model(model, str(path), threshold=threshold, input_type=inputs_of(name))


def their_model(authors: Authors, path: Path) -> Any:
    """A file, loaded by their code."""
    with contextlib.redirect_stdout(io.StringIO()):
        return authors.router.load_model(str(path), device="cpu")[0].eval()


def their_probability(model: Any, features: Mapping[str, Tensor]) -> Tensor:
    """p(divergent) [B], as their strategy reads a model's output."""
    with torch.no_grad():
        output = model(**features)
    if output.shape[1] == 1:
        return torch.sigmoid(output).squeeze(-1)
    probabilities = isinstance(model.backbone.output_layer[-1], torch.nn.Softmax)
    classes: Tensor = output if probabilities else output.softmax(-1)
    return classes[:, 2]


def our_probability(network: R2RNetwork, features: Mapping[str, Tensor], table: Tensor) -> Tensor:
    """The same of ours."""
    given = {}
    for name, size in network.sizes.items():
        if name == "token":
            given[name] = (table if network.embedding is None else network.embedding)[features["token"]]
        else:
            feature = features["hidden_states" if name == "hidden" else name]
            given[name] = feature.reshape(len(feature), network.window, size) if network.window > 1 else feature
    return network.probability(given)


def policy(path: Path, table: Tensor | None = None, **params: Any) -> Policy:
    """Our policy on a file, or without one."""
    if path.is_file():
        params["checkpoint"] = path.name
    spec = PolicySpec("r2r", msgspec.json.encode(params).decode())
    embedding = None if table is None else lambda model: table
    return load_policy(spec, PolicyContext(MODELS, str(path.parent), input_embedding=embedding))


def features_of(name: str, inputs: Inputs, sizes: Sizes) -> dict[str, Tensor]:
    """What a class takes, for all windows that lie in the requests (of one position for most)."""
    length = sizes.window if CLASSES[name].window else 1
    positions = inputs.tokens.shape[1] - length + 1
    top = inputs.logits.topk(sizes.top, dim=-1).values
    found: dict[str, Tensor] = {}
    for word in inputs_of(name):
        if word == "token":
            found[word] = inputs.tokens.flatten()
        else:
            whole = top if word == "logits" else inputs.hidden
            parts = [whole[:, i : i + positions] for i in range(length)]
            found[word] = torch.cat(parts, dim=-1).flatten(0, 1)
    return found


def compare_classes(authors: Authors, sizes: Sizes, table: Tensor, folder: Path) -> Iterator[Finding]:
    """Every class; files go into `folder`."""
    for number, (name, settings) in enumerate(variants()):
        yield from _compare_class(authors, name, settings, sizes, table, folder, number)


def variants() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every class as it is, and with inputs normalised where its own code can do that."""
    for name, kind in CLASSES.items():
        yield name, {}
        # Their norm over a window of hidden states is as wide as the window, and fails on its own parts.
        if not (kind.window and "hidden" in kind.inputs):
            yield name, {"normalize_input": True}
        if "lm_head" in kind.inputs:
            yield name, {"topk": 10}
        if kind.outputs == (3,):
            yield name, {"apply_softmax": False}
        elif len(kind.inputs) == 1:
            yield name, {"output_dim": 3}


def _compare_class(
    authors: Authors, name: str, settings: dict[str, Any], sizes: Sizes, table: Tensor, folder: Path, seed: int
) -> Iterator[Finding]:
    path = folder / f"{name}_{seed}.pt"
    given = arguments(name, sizes, folder / "small", **settings)
    saved(authors, name, path, threshold=0.5, seed=seed, arguments=given)
    inputs = Inputs.drawn(sizes, 20, 50, seed)
    features = features_of(name, inputs, sizes)
    theirs = their_probability(their_model(authors, path), features)
    shown = ", ".join(f"{key}={value}" for key, value in settings.items())
    files = [path]
    if "token" in CLASSES[name].inputs:
        files.append(path.with_name(f"{path.stem}_all.pt"))
    difference = max(largest(our_probability(load_r2r(file), features, table), theirs) for file in files)
    different = None
    if not CLASSES[name].window:
        threshold = float(theirs.median()) + 1e-4
        wanted = _switched(authors, path, threshold, inputs)
        got = decisions(policy(path, table, threshold=threshold), inputs.logits, inputs.hidden, inputs.tokens)
        if wanted is not None:
            different = int((got.flatten() != wanted).sum())
    yield Finding(SOURCE, name, shown, len(theirs), difference, different)


def _switched(authors: Authors, path: Path, threshold: float, inputs: Inputs) -> Tensor | None:
    """Their NeuralSwitching on all rows at once; None where it would apply a second softmax."""
    with contextlib.redirect_stdout(io.StringIO()):
        strategy = authors.switching.NeuralSwitching(str(path), threshold=threshold, device="cpu", use_cuda_graph=False)
    if isinstance(strategy.model.backbone.output_layer[-1], torch.nn.Softmax):
        return None
    rows = inputs.tokens.numel()
    outputs = authors.outputs(
        logits=inputs.logits.reshape(rows, 1, -1),
        hidden_states=[inputs.hidden.reshape(rows, 1, -1)],
        token=inputs.tokens.reshape(rows, 1),
    )
    choices: Tensor = strategy.route(outputs)
    return choices.bool()
