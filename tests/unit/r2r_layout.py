"""Builds R2R checkpoints in the official layout, and a naive numpy forward pass of each class."""

from __future__ import annotations

import math

import numpy as np
import torch

BOLD = "HiddenStatesTokenLMHeadLogitsClassifier"


def shapes(model_type, *, hidden=2, vocabulary=4, top=3, dims=(2, 3), expansion=2, outputs=1, normalize=False):
    """Shape by state-dict name."""
    found = {}

    def linear(name, rows, columns):
        found[f"{name}.weight"], found[f"{name}.bias"] = (rows, columns), (rows,)

    def norm(name, width):
        found[f"{name}.weight"], found[f"{name}.bias"] = (width,), (width,)

    if model_type in (BOLD, "HiddenStatesTokenLMHeadClassifier"):
        found["token_embeddings.weight"] = (vocabulary, hidden)
    parts = {BOLD: 3, "HiddenStatesTokenLMHeadClassifier": 2, "HiddenStatesLogitsClassifier": 2}.get(model_type, 0)
    if parts:
        linear("combined_projection", dims[0], parts * hidden)
    if model_type in (BOLD, "HiddenStatesLogitsClassifier"):
        linear("logits_projection", hidden, top)
    if model_type == "LogitsClassifier":
        linear("logits_projection", dims[0], top)
    if model_type == "HiddenStatesClassifier":
        linear("hidden_states_projection", dims[0], hidden)
    if model_type == "HiddenStatesClassifierWithLMHead":
        linear("lm_head", vocabulary, hidden)
        linear("post_lm_projection", dims[0], top)
    if normalize and parts:
        norm("layer_norm_hidden_states", hidden)
        if "Token" in model_type:
            norm("layer_norm_token", hidden)
    elif normalize and model_type.startswith("Hidden"):
        norm("layer_norm", hidden)
    linear("backbone.input_projection", dims[0], dims[0])
    for i, size in enumerate(dims):
        following = (*dims, dims[-1])[i + 1]
        norm(f"backbone.blocks.{i}.layer_norm", size)
        linear(f"backbone.blocks.{i}.mlp.0", size * expansion, size)
        linear(f"backbone.blocks.{i}.mlp.3", following, size * expansion)
        if following != size:
            linear(f"backbone.blocks.{i}.dim_change", following, size)
    norm("backbone.output_layer.0", dims[-1])
    linear("backbone.output_layer.1", outputs, dims[-1])
    return found


def is_norm_weight(name):
    return name.endswith("weight") and ("layer_norm" in name or "output_layer.0" in name)


def vector_state():
    """The test vector: 25 tensors, value 0.5 sin(1 + i + 3 j), plus 1 for layer-norm weights."""
    state = {}
    for j, (name, shape) in enumerate(sorted(shapes(BOLD).items())):
        flat = [0.5 * math.sin(1 + i + 3 * j) for i in range(math.prod(shape))]
        state[name] = torch.tensor(flat).reshape(shape) + is_norm_weight(name)
    return state


def random_state(model_type, seed=0, **sizes):
    g = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=g) * 0.5 + is_norm_weight(name)
        for name, shape in shapes(model_type, **sizes).items()
    }


def checkpoint(state, model_type=BOLD, *, threshold=0.21, keep_embedding=False, **init_args):
    """What the official trainer saves."""
    weights = {name: t for name, t in state.items() if keep_embedding or name != "token_embeddings.weight"}
    return {
        "model_type": model_type,
        # Wrong and unknown entries, as found in shipped configurations.
        "init_args": {
            "hidden_states_size": 2048,
            "pretrained_model_name": "a/small",
            "dtype": torch.float32,
            **init_args,
        },
        "common_args": {"threshold": threshold, "input_type": ["hidden_states", "token", "logits"]},
        "model_specific_args": {},
        "state_dict": weights,
    }


def reference(state, model_type, *, hidden, tokens, logits, top, normalize=False):
    """p(divergent) per row, in float64, one row at a time."""
    s = {name: tensor.double().numpy() for name, tensor in state.items()}

    def linear(name, x):
        return s[f"{name}.weight"] @ x + s[f"{name}.bias"]

    def norm(name, x):
        return (x - x.mean()) / math.sqrt(x.var() + 1e-5) * s[f"{name}.weight"] + s[f"{name}.bias"]

    def softmax(x):
        weights = np.exp(x - x.max())
        return weights / weights.sum()

    def row(h, token, full):
        largest = np.sort(full)[::-1][:top]
        if normalize:
            largest = softmax(largest)
        if model_type == "LogitsClassifier":
            x = linear("logits_projection", largest)
        elif model_type == "HiddenStatesClassifier":
            x = linear("hidden_states_projection", norm("layer_norm", h) if normalize else h)
        elif model_type == "HiddenStatesClassifierWithLMHead":
            outputs = linear("lm_head", norm("layer_norm", h) if normalize else h)
            x = linear("post_lm_projection", outputs if top == len(outputs) else np.sort(outputs)[::-1][:top])
        else:
            parts = [norm("layer_norm_hidden_states", h) if normalize else h]
            if "Token" in model_type:
                embedded = s["token_embeddings.weight"][token]
                parts.append(norm("layer_norm_token", embedded) if normalize else embedded)
            if "Logits" in model_type:
                parts.append(linear("logits_projection", largest))
            x = linear("combined_projection", np.concatenate(parts))
        x = linear("backbone.input_projection", x)
        if "backbone.position_embedding" in s:
            x = x + s["backbone.position_embedding"][0]
        i = 0
        while f"backbone.blocks.{i}.layer_norm.weight" in s:
            name = f"backbone.blocks.{i}"
            inner = linear(f"{name}.mlp.0", norm(f"{name}.layer_norm", x))
            inner = 0.5 * inner * (1 + np.array([math.erf(v / math.sqrt(2)) for v in inner]))
            residual = linear(f"{name}.dim_change", x) if f"{name}.dim_change.weight" in s else x
            x, i = residual + linear(f"{name}.mlp.3", inner), i + 1
        z = linear("backbone.output_layer.1", norm("backbone.output_layer.0", x))
        return 1 / (1 + math.exp(-z[0])) if len(z) == 1 else softmax(z)[2]

    return np.array([row(*values) for values in zip(hidden, tokens, logits, strict=True)])
