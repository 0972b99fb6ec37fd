"""Policies that take one design decision back: for ablations only, wrapped around any policy.

A subserver loads them by name, `perf.ablation.policies:Reprefill`, so nothing of this is in the production code.
"""

from __future__ import annotations

import json
import threading
from multiprocessing.connection import Client, Connection
from typing import Any

import msgspec
import torch

from tokenrouter.messages import PolicySpec
from tokenrouter.policies import load_policy
from tokenrouter.policies.base import (
    Destinations,
    Policy,
    PolicyParams,
    RouteBatch,
    Row,
    Visit,
)

REPREFILL = "perf.ablation.policies:Reprefill"
OUTSIDE = "perf.ablation.policies:OutsideRouter"


class Wrapped(Policy):
    """Does what another policy does, but for what a subclass overrides."""

    class Params(PolicyParams):
        """Name and parameters of that policy; `address` and `width` are for `OutsideRouter`."""

        policy: str
        params: dict[str, Any] = msgspec.field(default_factory=dict)
        address: str = ""
        width: int = 0

    def check(self) -> None:
        self.inner = load_policy(PolicySpec(self.params.policy, json.dumps(self.params.params)), self.context)
        for name in ("prepare", "mask", "visited", "entry", "receive", "route", "send"):
            if name not in vars(type(self)):
                setattr(self, name, getattr(self.inner, name))


class Reprefill(Wrapped):
    """No KV survives a hand-off: every visit begins with a prefill of the whole history."""

    name = "reprefill"

    def receive(self, row: Row) -> Visit:
        """Takes the KV away before the visit begins; the subserver truncates the engine's to what is left."""
        row.kv_length = 0  # type: ignore[attr-defined]
        return self.inner.receive(row)


class OutsideRouter(Wrapped):
    """The router runs in another process, as it would in the orchestrator: logits and hidden states travel there.

    Parameter `address`: socket of `router_process`. `width`: logits per row that travel, at least the model's own
    number; the rest is padding, to see what a larger vocabulary costs. One exchange per step, for the whole batch.
    """

    name = "outside_router"

    def check(self) -> None:
        super().check()
        self._lock = threading.Lock()
        self._connection: Connection | None = None

    def route(self, batch: RouteBatch) -> Destinations:
        logits = batch.logits
        if self.params.width > logits.shape[-1]:
            logits = torch.nn.functional.pad(logits, (0, self.params.width - logits.shape[-1]))
        hidden = None if batch.hidden is None else batch.hidden.numpy()
        head = (batch.model, batch.seeds, batch.positions, batch.tokens.numpy(), batch.logits.shape[-1])
        with self._lock:
            if self._connection is None:
                self._connection = Client(self.params.address, "AF_UNIX")
            self._connection.send((head, hidden))
            self._connection.send_bytes(logits.contiguous().numpy().tobytes())
            answer: list[str] = self._connection.recv()
        return answer
