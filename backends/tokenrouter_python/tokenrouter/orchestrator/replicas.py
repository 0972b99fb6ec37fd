"""Who serves what: the replicas of every model, KV reserved on each, and which requests are pinned to it.

A request is pinned to one replica per model when it starts, the one with the most free KV, because its KV lies there
from then on. The pin moves only if that replica is gone and another one has room.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tokenrouter.engines.base import blocks_needed
from tokenrouter.messages import ModelInfo
from tokenrouter.orchestrator.generation import Generation


@dataclass(slots=True)
class _Replica:
    """One replica.

    Attributes:
        info: None while it is not connected.
        lost_ns: when it was last lost.
        reserved_blocks: KV of the requests that are pinned to it.
        pinned: how many those are: the requests in flight that its thresholds are for.
        why: why it is not connected, if that is known.
    """

    model: str
    info: ModelInfo | None = None
    lost_ns: int = 0
    reserved_blocks: int = 0
    pinned: int = 0
    why: str = ""

    @property
    def capacity(self) -> int:
        """Most tokens of a sequence here; 0 while it is not connected."""
        return 0 if self.info is None else min(self.info.max_context, self.info.kv_blocks * self.info.block_tokens)

    def free_tokens(self, tokens: int) -> int:
        """Tokens of KV that nobody has reserved; -1 if so many cannot be reserved now."""
        info = self.info
        if info is None or tokens > info.max_context:
            return -1
        free = info.kv_blocks - self.reserved_blocks
        return -1 if blocks_needed(tokens, info.block_tokens) > free else free * info.block_tokens


class Replicas:
    """See the module's text.

    Args:
        replicas: names by model.

    Attributes:
        changed: replicas whose number of pinned requests is another one than before, or that came back; whoever tells
            them empties it.
    """

    def __init__(self, replicas: Mapping[str, Sequence[str]]) -> None:
        self._replicas = {name: _Replica(model) for model, names in replicas.items() for name in names}
        self._by_model = {model: {name: self._replicas[name] for name in names} for model, names in replicas.items()}
        self.changed: dict[str, None] = {}
        # Of each model the connected replica that takes the longest sequences: asked for at every admission.
        self._largest: dict[str, _Replica] = {
            model: next(iter(each.values())) for model, each in self._by_model.items()
        }

    # --- replicas -------------------------------------------------------------------------------------------------

    def connected(self, replica: str, info: ModelInfo) -> None:
        """A replica is there. What is reserved on it stays so: those requests will come to it."""
        self._replicas[replica].info = info
        self._replicas[replica].why = ""
        self._compare(self._replicas[replica].model)
        self.changed[replica] = None

    def disconnected(self, replica: str, *, now_ns: int) -> None:
        """A replica is gone."""
        self._replicas[replica].info = None
        self._replicas[replica].lost_ns = now_ns
        self._compare(self._replicas[replica].model)

    def unreachable(self, replica: str, why: str) -> None:
        """Why it is not connected."""
        self._replicas[replica].why = why

    def model_of(self, replica: str) -> str:
        """The model that it serves."""
        return self._replicas[replica].model

    def is_connected(self, replica: str) -> bool:
        return self._replicas[replica].info is not None

    def reserved_blocks(self, replica: str) -> int:
        """KV blocks reserved on it for running requests."""
        return self._replicas[replica].reserved_blocks

    def pinned(self, replica: str) -> int:
        """Running requests that are pinned to it."""
        return self._replicas[replica].pinned

    # --- models ---------------------------------------------------------------------------------------------------

    @property
    def models(self) -> Collection[str]:
        """All models of the deployment."""
        return self._by_model.keys()

    def largest(self, model: str) -> ModelInfo | None:
        """What the connected replica says that takes the longest sequences; None if none is connected."""
        return self._largest[model].info

    def fits(self, model: str, tokens: int) -> bool:
        """Whether a replica is connected on which so many tokens have room, if it is not now."""
        return self._largest[model].capacity >= tokens

    def has_room(self, model: str, tokens: int) -> bool:
        """Whether so many tokens can be reserved now."""
        return any(replica.free_tokens(tokens) >= 0 for replica in self._by_model[model].values())

    def _compare(self, model: str) -> None:
        self._largest[model] = max(self._by_model[model].values(), key=lambda replica: replica.capacity)

    def lost_ns(self, model: str) -> int:
        """When the last replica was lost."""
        return max(replica.lost_ns for replica in self._by_model[model].values())

    def why(self, model: str) -> str:
        """Why its replicas are not connected, as far as that is known."""
        return "; ".join(replica.why for replica in self._by_model[model].values() if replica.why)

    # --- requests -------------------------------------------------------------------------------------------------

    def pin(self, generation: Generation, model: str) -> bool:
        """Reserves KV on the replica with the most of it free, instead of where the request was pinned.

        Returns whether there was room; without, nothing changes.
        """
        tokens = generation.kv_tokens
        name, replica = max(self._by_model[model].items(), key=lambda item: item[1].free_tokens(tokens))
        info = replica.info
        if info is None or replica.free_tokens(tokens) < 0:
            return False
        self._unpin(generation, model)
        generation.pins[model] = name
        blocks = generation.reserved[model] = blocks_needed(tokens, info.block_tokens)
        generation.emulated |= info.emulated
        replica.reserved_blocks += blocks
        replica.pinned += 1
        self.changed[name] = None
        return True

    def release(self, generation: Generation) -> None:
        """The KV of a request is free again; its pins still say where it was."""
        for model in generation.pins:
            self._unpin(generation, model)

    def _unpin(self, generation: Generation, model: str) -> None:
        name = generation.pins.get(model)
        if name is not None:
            self._replicas[name].reserved_blocks -= generation.reserved[model]
            self._replicas[name].pinned -= 1
            self.changed[name] = None
