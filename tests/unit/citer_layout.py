"""State dicts in the layout of CITER's checkpoints, and a naive numpy forward pass."""

from __future__ import annotations

import numpy as np
import torch


def vector_state():
    return {
        "mlp.0.weight": torch.tensor([[1.0, 0], [0, 1], [1, 1], [-1, 1]]),
        "mlp.0.bias": torch.tensor([0, 0.1, -0.5, 0]),
        "mlp.1.weight": torch.tensor([1.0, 1, 2, 1]),
        "mlp.1.bias": torch.tensor([0, 0, 0, 0.5]),
        "mlp.1.running_mean": torch.tensor([0.0, 0, 1, 0]),
        "mlp.1.running_var": torch.tensor([1.0, 1, 4, 1]),
        "mlp.1.num_batches_tracked": torch.tensor(7),
        "mlp.4.weight": torch.tensor([[1.0, 0, 1, 0], [0, 1, 0, 1]]),
        "mlp.4.bias": torch.tensor([0, -0.5]),
        "linear.weight": torch.tensor([[1, 0.5]]),
        "linear.bias": torch.tensor([0.2]),
    }


def random_state(hidden=8, seed=0):
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g)

    return {
        "mlp.0.weight": normal(2 * hidden, hidden),
        "mlp.0.bias": normal(2 * hidden),
        "mlp.1.weight": normal(2 * hidden),
        "mlp.1.bias": normal(2 * hidden),
        "mlp.1.running_mean": normal(2 * hidden),
        "mlp.1.running_var": normal(2 * hidden).abs() + 0.1,
        "mlp.1.num_batches_tracked": torch.tensor(7),
        "mlp.4.weight": normal(hidden, 2 * hidden),
        "mlp.4.bias": normal(hidden),
        "linear.weight": normal(1, hidden),
        "linear.bias": normal(1),
    }


def reference(state, hidden):
    """Every layer by itself, in float64."""
    s = {name: tensor.double().numpy() for name, tensor in state.items()}
    x = hidden @ s["mlp.0.weight"].T + s["mlp.0.bias"]
    x = (x - s["mlp.1.running_mean"]) / np.sqrt(s["mlp.1.running_var"] + 1e-5) * s["mlp.1.weight"] + s["mlp.1.bias"]
    x = np.maximum(x, 0) @ s["mlp.4.weight"].T + s["mlp.4.bias"]
    return 1 / (1 + np.exp(-(x @ s["linear.weight"].T + s["linear.bias"])[:, 0]))
