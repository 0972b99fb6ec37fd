"""One integer per state, so that sets of states are sorted arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tools.dtmc.dynamics import States
from tools.dtmc.errors import TooLarge
from tools.dtmc.network import Ints, Network


@dataclass(frozen=True, slots=True)
class Codec:
    """Mixed-radix code: waiting counts, running counts, residuals, the residuals in the lowest digits.

    Attributes:
        radix: [3 * S] values that each digit takes.
    """

    radix: tuple[int, ...]

    @classmethod
    def of(cls, network: Network) -> Codec:
        """The codec of a network.

        Raises:
            TooLarge: a state does not fit 63 bits.
        """
        links = network.stations - network.models
        counts = network.inflight + 1
        waiting = [counts] * network.models + [1] * links  # a link never holds anything back
        running = [int(limit) + 1 for limit in network.max_batch]
        residual = [int(limit) + 1 for limit in network.ticks.max(axis=1)]
        radix = (*waiting, *running, *residual)
        if math.prod(radix) >= 2**63:
            raise TooLarge("a state does not fit 63 bits; raise delta_ms, or use fewer requests or models")
        return cls(radix)

    @property
    def phases(self) -> int:
        """Number of residual vectors; `code % phases` is the code of the residuals alone."""
        return math.prod(self.radix[2 * len(self.radix) // 3 :])

    def encode(self, states: States) -> Ints:
        """[rows] codes."""
        code = np.zeros(states.waiting.shape[1], dtype=np.int64)
        for radix, digit in zip(self.radix, np.vstack(states), strict=True):
            if radix > 1:
                code = code * radix + digit
        return code

    def decode(self, code: Ints) -> States:
        """The states of [rows] codes."""
        digits = np.zeros((len(self.radix), len(code)), dtype=np.int64)
        for place in range(len(self.radix) - 1, -1, -1):
            if self.radix[place] > 1:
                code, digits[place] = np.divmod(code, self.radix[place])
        return States(*np.split(digits, 3))
