"""R-Stitch (arXiv 2507.17307): the model that is unsure hands over, the large one hands back when it is sure.

H = -sum p ln p / ln V over the raw next-token distribution of the active model (temperature 1, V = width of the
logits), one threshold for both models. Small model: H > threshold leaves and discards its token. Large model: the
token is always kept; it returns when H <= threshold. (Sending without the large model's token, as a literal mirror of
the small side would, makes both models decode the same position for ever.) `measure: max_prob` is the first arXiv
version's confidence: small leaves when max p < threshold, large returns when max p >= threshold.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from tokenrouter.messages import Measure
from tokenrouter.policies.base import Destinations, Handoff, Policy, PolicyParams, RouteBatch, Row
from tokenrouter.policies.explaining import measured
from tokenrouter.policies.measures import entropy
from tokenrouter.policies.one_token import check_unit

if TYPE_CHECKING:
    from torch import Tensor


class RStitch(Policy):
    """Symmetric entropy threshold."""

    name = "rstitch"
    two_models = True

    class Params(PolicyParams):
        """Knobs of `RStitch`.

        `threshold` lies in [0, 1]; the authors use 0.001 to 0.03. `measure`: normalised ``entropy`` or ``max_prob``.
        """

        threshold: float = 0.03
        measure: Literal["entropy", "max_prob"] = "entropy"

    def check(self) -> None:
        """Refuses thresholds outside [0, 1]; NaN is outside."""
        check_unit("threshold", self.params.threshold)

    def speculates(self) -> bool:
        """The rule looks at one position of the active model."""
        return True

    def route(self, batch: RouteBatch) -> Destinations:
        """[B] bool: unsure leaves small, sure leaves large."""
        value = self._value(batch.logits)
        by_probability = self.params.measure == "max_prob"
        unsure: Tensor = value < self.params.threshold if by_probability else value > self.params.threshold
        return unsure if batch.model == self.models[0] else ~unsure

    def explain(self, batch: RouteBatch) -> Sequence[Sequence[Measure]]:
        """The active model's certainty."""
        small, measure = batch.model == self.models[0], self.params.measure
        relation = {"max_prob": ("<", ">="), "entropy": (">", "<=")}[measure][not small]
        return measured(measure, self._value(batch.logits), relation, self.params.threshold)

    def _value(self, logits: Tensor) -> Tensor:
        """[B] the measure."""
        if self.params.measure == "max_prob":
            return logits.softmax(-1).amax(-1)
        return entropy(logits) / math.log(logits.shape[-1])

    def send(self, row: Row, target: str) -> Handoff:
        """Exclusive from the small model, inclusive from the large one."""
        return Handoff(keep_token=row.model != self.models[0])
