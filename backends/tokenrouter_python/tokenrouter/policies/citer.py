"""CITER (arXiv 2502.01976): a network on the small model's hidden state scores its confidence.

Evaluated after every forward pass of the small model on the hidden state that predicted the token; no logits, no token
id, no history. score = network(h) in (0, 1) says that the small model is good enough; **score < threshold** leaves. The
token is discarded, the large model writes exactly one. Source: aiming-lab/CITER, src/pipeline/token_route.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenrouter.errors import InvalidRequest
from tokenrouter.messages import Measure
from tokenrouter.policies.base import Destinations, PolicyParams, RouteBatch
from tokenrouter.policies.explaining import measured
from tokenrouter.policies.one_token import LearnedOneToken

if TYPE_CHECKING:
    from torch import Tensor

    from tokenrouter.policies.checkpoints.citer import CiterNetwork


class Citer(LearnedOneToken):
    """Leaves for one token where the confidence score falls below the threshold."""

    name = "citer"
    default_threshold = 0.95

    class Params(PolicyParams):
        """Knobs of `Citer`.

        `checkpoint`: an official ``.pth`` file or our ``.safetensors``; by default the deployment's own. `threshold`:
        in [0, 1], by default the file's, else 0.95; the source's examples use 0.9 and 0.95, the TokenRouter paper 0.98.
        """

        checkpoint: str = ""
        threshold: float | None = None

    def check(self) -> None:
        """Refuses a threshold outside [0, 1], a missing checkpoint, and one outside of the deployment's folder."""
        super().check()
        if not self.checkpoint:
            raise InvalidRequest(
                "policy_params.checkpoint is missing: citer needs a trained router (.pth, .safetensors)"
            )

    @staticmethod
    def load(path: Path, device: str) -> CiterNetwork:
        """The network of a file."""
        from tokenrouter.policies.checkpoints.citer import load_citer

        return load_citer(path, device)

    def leaves(self, batch: RouteBatch) -> Destinations:
        """[B] bool."""
        score, threshold = self._score(batch)
        return score < threshold

    def explain(self, batch: RouteBatch) -> Sequence[Sequence[Measure]]:
        """The score, at the small model."""
        if batch.model != self.models[0]:
            return super().explain(batch)
        score, threshold = self._score(batch)
        return measured("score", score, "<", threshold)

    def _score(self, batch: RouteBatch) -> tuple[Tensor, float]:
        """[B] the score, and what it has to reach."""
        network: CiterNetwork = self.network(str(batch.logits.device))
        return network.score(self.hidden(batch, network)), self.threshold(network.threshold)
