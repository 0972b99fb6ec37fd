"""Synthetic certainty for the emulated engine: at which positions a model is unsure, and what it shows for it.

Policies judge logits and hidden states. Here a draw, keyed by (prompt, position, stream), makes a position unsure at a
given rate, and both show it: logits that are nearly flat or nearly one-hot, and a hidden state whose first coordinate
is +1 or -1, for small routers that read it. The draw depends on nothing else: not on the request's seed, the batch, the
thresholds, or the server that holds the model, so the same prompts are routed alike wherever they run.

Every policy that compares certainty with a threshold then fires at the rate, at its usual thresholds: an unsure row's
normalised entropy is above 0.9, a sure one's below 0.001 (R-Stitch's thresholds lie between 0.001 and 0.03).

How often a model agrees with the others is a draw of the same kind: where it fails, the model prefers another token.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from hashlib import blake2b

import msgspec
import numpy as np
import numpy.typing as npt

from tokenrouter.rng import uniform

# Noise lies in [-1, 1]: an unsure row's preferred token is just the largest, so greedy decoding still takes it.
UNSURE_LOGIT = 1.25
# Clear of the streams of `rng.Stream`, although keys are hashes of prompts, not seeds.
_STREAMS = 1 << 40
_AGREEMENT = 1 << 41


class SignalsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How often a model is unsure.

    Attributes:
        unsure: share of positions, in [0, 1]. For a policy that leaves the small model at a rate p and the large one
            at a rate q, it is p at the small model and 1 - q at the large one.
        stream: models with different streams are unsure independently of each other; with equal ones, the model with
            the higher share is unsure wherever the other one is.
        agreement: share of positions, in [0, 1], at which the model prefers the token that models without this setting
            prefer. Given to the large model, it is how often that writes what the small one would have written.
    """

    unsure: float = 0.0
    stream: int = 0
    agreement: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.unsure <= 1.0 or self.stream < 0:
            raise ValueError("signals: unsure lies in [0, 1], stream is at least 0")
        if not 0.0 <= self.agreement <= 1.0:
            raise ValueError(f"signals: agreement is {self.agreement:g}; it lies in [0, 1]")


def prompt_key(prompt: Sequence[int]) -> int:
    """64-bit hash of a prompt's token ids."""
    return int.from_bytes(blake2b(array("q", prompt).tobytes(), digest_size=8).digest(), "little")


def unsure(config: SignalsConfig, keys: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.bool_]:
    """[B] whether the model is unsure of the token at each position.

    Args:
        config: rate and stream.
        keys: [B] `prompt_key` of the requests.
        positions: [B] index in the response.
    """
    found: npt.NDArray[np.bool_] = uniform(keys, positions, _STREAMS + config.stream) < config.unsure
    return found


def disagrees(config: SignalsConfig, keys: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.bool_]:
    """[B] whether the model prefers another token at each position than models that always agree. As for `unsure`."""
    if config.agreement == 1.0:
        return np.zeros(len(keys), dtype=np.bool_)
    found: npt.NDArray[np.bool_] = uniform(keys, positions, _AGREEMENT) >= config.agreement
    return found


def sure_logit(margin: float, vocab_size: int) -> float:
    """The preferred token's logit where the model is sure: `margin`, and what makes up for the width of the noise."""
    return margin + math.log(vocab_size)
