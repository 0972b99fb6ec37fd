"""Co-LLM (arXiv 2403.03870): the small model itself says, by one extra row of its LM head, that it defers.

d = sigmoid(g . h), with g the deferral row and h the hidden state fed to the LM head; not part of a softmax, no
temperature. **d > threshold** leaves. The token is discarded, the large model writes exactly one. d is read from the
small model's last logit column, or, if `checkpoint` names the row as a file of its own, computed from hidden states.
Source: clinicalml/co-llm, collm/generate.py.

The extra column and every id beyond the large model's vocabulary are banned from sampling (`Policy.mask`): the source
takes the argmax over the first len(tokenizer of the large model) columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tokenrouter.errors import ConfigError, InvalidRequest
from tokenrouter.messages import Measure
from tokenrouter.policies.base import Destinations, PolicyParams, RouteBatch
from tokenrouter.policies.explaining import measured
from tokenrouter.policies.one_token import LearnedOneToken

if TYPE_CHECKING:
    from torch import Tensor

    from tokenrouter.policies.checkpoints.collm import DeferralRow


class CoLLM(LearnedOneToken):
    """Leaves for one token where the deferral probability exceeds the threshold."""

    name = "collm"
    default_threshold = 0.5

    class Params(PolicyParams):
        """Knobs of `CoLLM`.

        `checkpoint`: the deferral row as a file (our ``.safetensors``, a tensor saved by torch.save, or the folder of
        the fine-tuned model); by default the deployment's own, and if it has none, or `deferral_id` is given, a logit
        column: the last one unless `deferral_id` names it (for logits that are padded behind it). `threshold`: in
        [0, 1], by default the file's, else 0.5; the TokenRouter paper uses 0.15. `vocab_size`: the small model samples
        ids below this; by default the deployment's tokenizer decides. `warmup`: the threshold starts at 1 and reaches
        its value at position `warmup_tokens`. `mode`: only ``defer`` can be served.
        """

        checkpoint: str = ""
        threshold: float | None = None
        deferral_id: int | None = None
        vocab_size: int | None = None
        warmup: Literal["none", "linear", "cosine", "exponential"] = "none"
        warmup_tokens: int = 15
        mode: Literal["defer", "compose"] = "defer"

    def check(self) -> None:
        """Refuses a threshold outside [0, 1], sizes below 1, and `compose`."""
        super().check()
        params = self.params
        if params.mode == "compose":
            raise InvalidRequest(
                "policy_params.mode 'compose' mixes the distributions of both models at one position; this server's "
                "models exchange tokens, not distributions. Use 'defer'"
            )
        for knob in ("vocab_size", "deferral_id", "warmup_tokens"):
            value = getattr(params, knob)
            if value is not None and value < 1:
                raise InvalidRequest(f"policy_params.{knob} is {value}; it is at least 1")
        if params.checkpoint and params.deferral_id is not None:
            raise InvalidRequest(
                "policy_params.deferral_id names a logit column, checkpoint a row of its own: give one"
            )
        if params.warmup == "exponential" and params.threshold == 0.0:
            raise InvalidRequest("policy_params.warmup 'exponential' never reaches threshold 0; use 'linear'")

    def uses_checkpoint(self) -> bool:
        """Whether the row is a file, rather than a logit column."""
        return bool(self.checkpoint) and self.params.deferral_id is None

    @staticmethod
    def load(path: Path, device: str) -> DeferralRow:
        """The row of a file."""
        from tokenrouter.policies.checkpoints.collm import load_deferral

        return load_deferral(path, device)

    def mask(self, model: str, vocab_size: int) -> Sequence[int]:
        """The small model's deferral column and everything beyond the large model's tokens."""
        if model != self.models[0]:
            return ()
        columns = vocab_size if self.uses_checkpoint() else self._column(vocab_size)
        known = columns if self.params.vocab_size is None else self.params.vocab_size
        tokenizer = self.context.tokenizer
        if self.params.vocab_size is None and tokenizer is not None:
            known = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        return range(min(known, columns), vocab_size)

    def _column(self, vocab_size: int) -> int:
        """Index of the deferral column.

        Raises:
            ConfigError: the model has no such column.
        """
        column: int | None = self.params.deferral_id
        if column is not None and column >= vocab_size:
            raise ConfigError(
                f"policy_params.deferral_id is {column}; {self.models[0]!r} has {vocab_size} logit columns"
            )
        return vocab_size - 1 if column is None else column

    def leaves(self, batch: RouteBatch) -> Destinations:
        """[B] bool."""
        deferral, thresholds = self._deferral(batch)
        return deferral > thresholds

    def explain(self, batch: RouteBatch) -> Sequence[Sequence[Measure]]:
        """The deferral probability, at the small model."""
        if batch.model != self.models[0]:
            return super().explain(batch)
        deferral, thresholds = self._deferral(batch)
        return measured("d", deferral, ">", thresholds)

    def _deferral(self, batch: RouteBatch) -> tuple[Tensor, float | Tensor]:
        """[B] the deferral probability, and what it has to exceed."""
        if not self.uses_checkpoint():
            column = self._column(batch.logits.shape[-1])
            return batch.logits[:, column].sigmoid(), self._thresholds(batch, None)
        row: DeferralRow = self.network(str(batch.logits.device))
        return row.probability(self.hidden(batch, row)), self._thresholds(batch, row.threshold)

    def _thresholds(self, batch: RouteBatch, stored: float | None) -> float | Tensor:
        """One threshold, or [B] of them during the warm-up."""
        final = self.threshold(stored)
        warmup, length = self.params.warmup, self.params.warmup_tokens
        if warmup == "none" or all(position >= length for position in batch.positions):
            return final
        values = [
            _warm(warmup, position / length, final) if position < length else final for position in batch.positions
        ]
        return batch.logits.new_tensor(values)


def _warm(schedule: str, done: float, final: float) -> float:
    """Threshold when a share `done` in [0, 1) of the warm-up has passed; it starts at 1, where nothing defers."""
    if schedule == "linear":
        return 1.0 + (final - 1.0) * done
    if schedule == "cosine":
        return final + (1.0 - final) / 2 * (1.0 + math.cos(math.pi * done))
    return float(final**done)
