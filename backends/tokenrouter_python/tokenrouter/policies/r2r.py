"""R2R (arXiv 2505.21600): a network at the small model predicts that its token makes the answer diverge.

Evaluated after every forward pass of the small model, the first included, on that position alone: the 100 largest raw
logits, the hidden state fed to the LM head, and the id just sampled. p = sigmoid(network); **p >= threshold** leaves.
The token is discarded, the large model writes exactly one. Source: thu-nics/R2R, r2r/utils/switching.py; that
repository's commit 3f33652 overwrites the result by a coin toss, which is not followed here.

The other strategies are baselines of the same registry. `entropy` (nats, >= 0.45) and `immediate` (no configured
measure below its threshold) look at one position. `momentum`, `rolling`, `duo_rolling` and `neural_rolling` remember
what they decided before (`hysteresis`), as networks of several positions remember these (`window`; a request's first
positions, where there are too few, are the large model's). What is remembered is a value in the request's state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tokenrouter.errors import ConfigError, InvalidRequest
from tokenrouter.messages import Measure
from tokenrouter.policies.base import Destinations, PolicyParams, RouteBatch
from tokenrouter.policies.explaining import joined, measured
from tokenrouter.policies.hysteresis import Memory, Momentum, Rule, duo_rolling, neural_rolling, rolling
from tokenrouter.policies.measures import entropy, evidence
from tokenrouter.policies.one_token import LearnedOneToken, check_unit
from tokenrouter.policies.window import remember, windows

if TYPE_CHECKING:
    from torch import Tensor

    from tokenrouter.policies.checkpoints.r2r import R2RNetwork

Strategy: TypeAlias = Literal["neural", "entropy", "immediate", "momentum", "rolling", "duo_rolling", "neural_rolling"]

_NEURAL = ("neural", "neural_rolling")
_ALEATORIC_THRESHOLD = 2.275
# Knob -> the value it has in each strategy that reads it; None: the strategy goes without.
_KNOBS: Mapping[str, Mapping[str, float | None]] = {
    "threshold": {"neural": None, "neural_rolling": None},
    "checkpoint": {"neural": None, "neural_rolling": None},
    "entropy_threshold": {"entropy": 0.45, "immediate": None, "rolling": 0.02},
    "aleatoric_threshold": {
        "immediate": None,
        **dict.fromkeys(("momentum", "rolling", "duo_rolling"), _ALEATORIC_THRESHOLD),
    },
    "epistemic_threshold": {"immediate": None},
    "momentum_factor": {"momentum": 0.7},
    "quick_to_ref_threshold": {"momentum": 0.3},
    "ref_to_quick_threshold": {"momentum": 0.7},
    "window_size": dict.fromkeys(("rolling", "duo_rolling", "neural_rolling"), 3),
}


class R2R(LearnedOneToken):
    """Leaves for one token where the router network, or a measure of uncertainty, says that the token is critical."""

    name = "r2r"
    default_threshold = 0.5

    class Params(PolicyParams):
        """Knobs of `R2R`.

        `checkpoint`: an official ``.pt`` file or our ``.safetensors``, for `neural` and `neural_rolling`; by default
        the deployment's own. `threshold`: of p, in [0, 1]; by default the file's, else 0.5. The others are for the
        strategies in `_KNOBS`, with the source's names and defaults: `entropy_threshold` in nats, `momentum_factor` and
        both thresholds of the momentum in [0, 1], `window_size` in decisions.
        """

        checkpoint: str = ""
        threshold: float | None = None
        strategy: Strategy = "neural"
        entropy_threshold: float | None = None
        aleatoric_threshold: float | None = None
        epistemic_threshold: float | None = None
        momentum_factor: float | None = None
        quick_to_ref_threshold: float | None = None
        ref_to_quick_threshold: float | None = None
        window_size: int | None = None

    def check(self) -> None:
        """Refuses values out of range, a missing checkpoint, and knobs of another strategy."""
        super().check()
        params = self.params
        if self.uses_checkpoint() and not self.checkpoint:
            raise InvalidRequest(
                "policy_params.checkpoint is missing: r2r needs a trained router (.pt or .safetensors)"
            )
        for knob, used in _KNOBS.items():
            if getattr(params, knob) not in (None, "") and params.strategy not in used:
                raise InvalidRequest(
                    f"policy_params.{knob} has no use with strategy {params.strategy!r}; it is for {', '.join(used)}"
                )
        for knob in ("momentum_factor", "quick_to_ref_threshold", "ref_to_quick_threshold"):
            check_unit(knob, getattr(params, knob))
        if params.window_size is not None and params.window_size < 1:
            raise InvalidRequest(f"policy_params.window_size is {params.window_size}; it is at least 1")

    def uses_checkpoint(self) -> bool:
        """Only the network is in a file."""
        return self.params.strategy in _NEURAL

    def prepare(self, model: str) -> None:
        """Loads the network at the small model, and checks its width against the model's input embedding."""
        super().prepare(model)
        if model == self.models[0] and self.uses_checkpoint():
            self._embedding(self._checked(self.network(self.context.device)))

    def needs_token(self, model: str) -> bool:
        """If the network takes its embedding."""
        return self.needs_hidden(model) and "token" in self.network("cpu").sizes

    def remembers(self, model: str) -> bool:
        """At the small model: what was decided there before, or the features of several positions."""
        if model != self.models[0] or self.params.strategy in ("entropy", "immediate"):
            return False
        return self.params.strategy != "neural" or bool(self.network(self.context.device).window > 1)

    def speculates(self) -> bool:
        """Strategies without a memory; a network of several positions is seen by `remembers`, where it is loaded."""
        return self.params.strategy in ("neural", "entropy", "immediate")

    @staticmethod
    def load(path: Path, device: str) -> R2RNetwork:
        """The network of a file."""
        from tokenrouter.policies.checkpoints.r2r import load_r2r

        return load_r2r(path, device)

    def leaves(self, batch: RouteBatch) -> Destinations:
        """[B] bool."""
        strategy = self.params.strategy
        if strategy in _NEURAL:
            network: R2RNetwork = self._checked(self.network(str(batch.logits.device)))
            features, threshold = self._features(network, batch), self.threshold(network.threshold)
            if network.window > 1:
                return _leaves_by_window(network, features, threshold, batch)
            p = network.probability(features)
            if strategy == "neural":
                return p >= threshold
            return _leaves_by_rule(neural_rolling(threshold, self._knob("window_size")), batch, p)
        if strategy == "entropy":
            simple: Tensor = entropy(batch.logits) < self._knob("entropy_threshold")
            return simple.logical_not()
        if strategy == "immediate":
            return self._immediate(batch.logits)
        return _leaves_by_rule(self._rule(), batch, *self._signals(batch))

    def explain(self, batch: RouteBatch) -> Sequence[Sequence[Measure]]:
        """What the strategy looks at, at the small model: p, measures of uncertainty, or their mean or momentum."""
        strategy = self.params.strategy
        if batch.model != self.models[0]:
            return super().explain(batch)
        if strategy in _NEURAL:
            return self._explain_network(batch)
        if strategy in ("entropy", "immediate"):
            limits = self._limits() if strategy == "immediate" else [self._knob("entropy_threshold"), None, None]
            values = (entropy(batch.logits), *evidence(batch.logits))
            names = ("entropy", "aleatoric", "epistemic")
            known = [each for each in zip(names, values, limits, strict=True) if each[2] is not None]
            return joined(*(measured(name, value, ">=", limit) for name, value, limit in known))
        return _explain_rule(self._rule(), batch, *self._signals(batch))

    def _explain_network(self, batch: RouteBatch) -> Sequence[Sequence[Measure]]:
        network: R2RNetwork = self._checked(self.network(str(batch.logits.device)))
        features, threshold = self._features(network, batch), self.threshold(network.threshold)
        full = [True] * len(batch)
        if network.window > 1:
            ((name, current),) = features.items()
            window, full = windows(batch.rows, current, network.window)
            features = {name: window}
        p = network.probability(features)
        if self.params.strategy == "neural_rolling":
            return _explain_rule(neural_rolling(threshold, self._knob("window_size")), batch, p)
        # Too few positions for the network: the large model's, whatever it would say.
        return [told if enough else () for told, enough in zip(measured("p", p, ">=", threshold), full, strict=True)]

    def _signals(self, batch: RouteBatch) -> list[Tensor]:
        """What a rule without a network takes, [B] each."""
        signals = [evidence(batch.logits)[0]]
        return [*signals, entropy(batch.logits)] if self.params.strategy == "rolling" else signals

    def _knob(self, name: str) -> Any:
        """Its value, else the strategy's default."""
        given = getattr(self.params, name)
        return _KNOBS[name][self.params.strategy] if given is None else given

    def _rule(self) -> Rule:
        """That of a strategy with a memory and without a network."""
        limit = self._knob("aleatoric_threshold")
        if self.params.strategy == "momentum":
            bounds = (self._knob("quick_to_ref_threshold"), self._knob("ref_to_quick_threshold"))
            return Momentum(limit, self._knob("momentum_factor"), *bounds)
        if self.params.strategy == "rolling":
            return rolling(limit, self._knob("entropy_threshold"), self._knob("window_size"))
        return duo_rolling(limit, self._knob("window_size"))

    def _checked(self, network: R2RNetwork) -> R2RNetwork:
        """The network, if the strategy can use it.

        Raises:
            ConfigError: the strategy averages over positions, and the network takes several at once.
        """
        if network.window > 1 and self.params.strategy != "neural":
            raise ConfigError(
                f"{network.origin}: model_type {network.model_type} takes {network.window} positions at once, which "
                f"strategy {self.params.strategy!r} does not offer; use strategy 'neural'"
            )
        return network

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

    def _limits(self) -> list[float | None]:
        """Of strategy `immediate`: thresholds of entropy, aleatoric and epistemic uncertainty."""
        limits = [self._knob(f"{measure}_threshold") for measure in ("entropy", "aleatoric", "epistemic")]
        return [None, _ALEATORIC_THRESHOLD, None] if all(limit is None for limit in limits) else limits

    def _immediate(self, logits: Tensor) -> Tensor:
        """[B] bool: no measure that has a threshold is below it (a NaN is not: logits are no evidence if negative)."""
        measures = (entropy(logits), *evidence(logits))
        below = [measure < limit for measure, limit in zip(measures, self._limits(), strict=True) if limit is not None]
        found: Tensor = below[0]
        for each in below[1:]:
            found = found | each
        return found.logical_not()


def _explain_rule(rule: Rule, batch: RouteBatch, *signals: Tensor) -> Sequence[Sequence[Measure]]:
    """What a rule with a memory looks at, [B]."""
    values = zip(*(signal.tolist() for signal in signals), strict=True)
    return [
        tuple(rule.measures(Memory.of(row.state.get("memory")), own))
        for row, own in zip(batch.rows, values, strict=True)
    ]


def _leaves_by_rule(rule: Rule, batch: RouteBatch, *signals: Tensor) -> Sequence[bool]:
    """[B] bool by a rule with a memory; the states of the rows move on."""
    # One tensor, so that the host waits for the device once.
    packed = signals[0].new_empty((len(batch), len(signals)))
    for i, signal in enumerate(signals):
        packed[:, i] = signal
    leaves = []
    for row, values in zip(batch.rows, packed.tolist(), strict=True):
        memory = rule.after(Memory.of(row.state.get("memory")), values)
        row.state["memory"] = memory.plain()
        leaves.append(memory.large)
    return leaves


def _leaves_by_window(
    network: R2RNetwork, features: Mapping[str, Tensor], threshold: float, batch: RouteBatch
) -> Sequence[bool]:
    """[B] bool by a network of several positions; as long as a request has too few, the large model writes."""
    ((name, current),) = features.items()
    window, full = windows(batch.rows, current, network.window)
    p = network.probability({name: window})
    packed = current.new_empty((len(batch), current.shape[1] + 1))
    packed[:, :-1], packed[:, -1] = current, p >= threshold
    host = packed.cpu().numpy()
    remember(batch.rows, host[:, :-1], network.window)
    return [bool(leaves) or not enough for leaves, enough in zip(host[:, -1], full, strict=True)]
