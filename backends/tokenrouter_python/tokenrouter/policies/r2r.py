"""R2R (arXiv 2505.21600): a network at the small model predicts that its token makes the answer diverge.

Evaluated after every forward pass of the small model, the first included, on that position alone: the 100 largest raw
logits, the hidden state fed to the LM head, and the id just sampled. p = sigmoid(network); **p >= threshold** leaves.
The token is discarded, the large model writes exactly one. Source: thu-nics/R2R, r2r/utils/switching.py; that
repository's commit 3f33652 overwrites the result by a coin toss, which is not followed here.

`strategy: entropy` (nats, >= 0.45) and `immediate` (every configured measure >= its threshold) are the baselines of the
same registry.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tokenrouter.errors import ConfigError, InvalidRequest
from tokenrouter.policies.base import Destinations, PolicyParams, RouteBatch
from tokenrouter.policies.measures import entropy, evidence
from tokenrouter.policies.one_token import LearnedOneToken

if TYPE_CHECKING:
    from torch import Tensor

    from tokenrouter.policies.checkpoints.r2r import R2RNetwork

_ENTROPY_THRESHOLD = 0.45
_ALEATORIC_THRESHOLD = 2.275


class R2R(LearnedOneToken):
    """Leaves for one token where the router network, or a measure of uncertainty, says that the token is critical."""

    name = "r2r"
    default_threshold = 0.5

    class Params(PolicyParams):
        """Knobs of `R2R`.

        `checkpoint`: an official ``.pt`` file or our ``.safetensors``, for `strategy: neural`; by default the
        deployment's own. `threshold`: of p, in [0, 1]; by default the file's, else 0.5. The other thresholds are for
        `entropy` (nats) and `immediate`.
        """

        checkpoint: str = ""
        threshold: float | None = None
        strategy: Literal["neural", "entropy", "immediate"] = "neural"
        entropy_threshold: float | None = None
        aleatoric_threshold: float | None = None
        epistemic_threshold: float | None = None

    def check(self) -> None:
        """Refuses a threshold outside [0, 1], a missing checkpoint, and knobs of another strategy."""
        super().check()
        params = self.params
        if params.strategy == "neural" and not self.checkpoint:
            raise InvalidRequest(
                "policy_params.checkpoint is missing: r2r needs a trained router (.pt or .safetensors)"
            )
        used = {"neural": (), "entropy": ("entropy",), "immediate": ("entropy", "aleatoric", "epistemic")}
        for measure in ("entropy", "aleatoric", "epistemic"):
            if getattr(params, f"{measure}_threshold") is not None and measure not in used[params.strategy]:
                raise InvalidRequest(f"policy_params.{measure}_threshold has no use with strategy {params.strategy!r}")

    def uses_checkpoint(self) -> bool:
        """Only the network is in a file."""
        return bool(self.params.strategy == "neural")

    def prepare(self, model: str) -> None:
        """Loads the network at the small model, and checks its width against the model's input embedding."""
        super().prepare(model)
        if model == self.models[0] and self.uses_checkpoint():
            self._embedding(self.network(self.context.device))

    def needs_token(self, model: str) -> bool:
        """If the network takes its embedding."""
        return self.needs_hidden(model) and "token" in self.network("cpu").sizes

    @staticmethod
    def load(path: Path, device: str) -> R2RNetwork:
        """The network of a file."""
        from tokenrouter.policies.checkpoints.r2r import load_r2r

        return load_r2r(path, device)

    def leaves(self, batch: RouteBatch) -> Destinations:
        """[B] bool."""
        if self.params.strategy == "neural":
            network: R2RNetwork = self.network(str(batch.logits.device))
            return network.probability(self._features(network, batch)) >= self.threshold(network.threshold)
        return self._measured(batch.logits)

    def _features(self, network: R2RNetwork, batch: RouteBatch) -> dict[str, Tensor]:
        """What the network's class takes, float32: hidden [B, H], token [B, E], logits [B, K]."""
        sizes, features = network.sizes, {}
        if "hidden" in sizes:
            features["hidden"] = self.hidden(batch, network)
        if "token" in sizes:
            table = self._embedding(network)
            features["token"] = table[batch.tokens.to(table.device)].to(batch.tokens.device).float()
        if "logits" in sizes:
            if batch.logits.shape[-1] < sizes["logits"]:
                raise ConfigError(
                    f"{network.origin}: takes the {sizes['logits']} largest logits, {batch.model!r} has only "
                    f"{batch.logits.shape[-1]}"
                )
            features["logits"] = batch.logits.topk(sizes["logits"], dim=-1).values.float()
        return features

    def _embedding(self, network: R2RNetwork) -> Any:
        """[V, E] token embedding: the file's, else the small model's own (it was frozen in training).

        Raises:
            ConfigError: neither is available, or the model's has another width.
        """
        if "token" not in network.sizes or network.embedding is not None:
            return network.embedding
        table = self.needed("input_embedding", self.context.input_embedding)(self.models[0])
        if table.shape[-1] != network.sizes["token"]:
            raise ConfigError(
                f"{network.origin}: expects a token embedding of width {network.sizes['token']} "
                f"(combined_projection.weight); the input embedding of {self.models[0]!r} has {table.shape[-1]}; the "
                "router was trained for another small model"
            )
        return table

    def _measured(self, logits: Tensor) -> Tensor:
        """[B] bool of the strategies without a network."""
        params: R2R.Params = self.params
        if params.strategy == "entropy":
            limit = params.entropy_threshold
            return entropy(logits) >= (_ENTROPY_THRESHOLD if limit is None else limit)
        limits = (params.entropy_threshold, params.aleatoric_threshold, params.epistemic_threshold)
        if all(limit is None for limit in limits):
            limits = (None, _ALEATORIC_THRESHOLD, None)
        measures = (entropy(logits), *evidence(logits))
        hits = [measure >= limit for measure, limit in zip(measures, limits, strict=True) if limit is not None]
        decision = hits[0]
        for hit in hits[1:]:
            decision = decision & hit
        return decision
