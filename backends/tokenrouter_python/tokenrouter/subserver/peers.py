"""The orchestrators of one model: who may connect, what it is told first, and what each of them has here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tokenrouter.engines.base import EngineInfo
from tokenrouter.errors import ProtocolError
from tokenrouter.messages import Hello, ModelInfo
from tokenrouter.protocol_version import OLDEST_VERSION, PROTOCOL_VERSION, check_version
from tokenrouter.subserver.sequence import ModelSequence


@dataclass(slots=True)
class Peer:
    """A connected orchestrator, with its sequences by request."""

    name: str
    share: str
    models: tuple[str, ...]
    in_flight: int = 0
    sequences: dict[int, ModelSequence] = field(default_factory=dict)


class Reception:
    """Lets orchestrators in; see `machine.Subserver` for the arguments."""

    def __init__(self, name: str, model: str, *, shares: dict[str, int], orchestrators: int) -> None:
        self._name = name
        self._model = model
        self._shares = shares
        self._orchestrators = orchestrators

    def admit(self, number: int, hello: Hello, connected: Mapping[int, Peer]) -> Peer:
        """Whoever says this, beside those that are connected.

        Raises:
            ProtocolError: it may not come in, and why.
        """
        check_version(hello.peer, hello.version, hello.oldest)
        if number in connected:
            raise ProtocolError(f"{hello.peer} sent Hello twice")
        if hello.share not in self._shares:
            raise ProtocolError(f"{hello.peer} asks for the unknown KV share {hello.share!r}")
        if self._model not in hello.models:
            raise ProtocolError(f"{hello.peer} does not list this model, {self._model}, among {hello.models}")
        self._check_room(hello, connected)
        return Peer(hello.peer, hello.share, hello.models)

    def _check_room(self, hello: Hello, connected: Mapping[int, Peer]) -> None:
        """One more would take KV that was promised to others."""
        same = sum((peer.name, peer.share) == (hello.peer, hello.share) for peer in connected.values())
        if self._orchestrators and hello.share != "direct" and same >= self._orchestrators:
            raise ProtocolError(
                f"{same} of entry model {hello.peer!r} are connected to {self._name} already and share its KV; for "
                "more raise entry.routed_orchestrators and build the repository again"
            )

    def greeting(self, hello: Hello, info: EngineInfo, *, speculates: bool) -> ModelInfo:
        """What one that was let in is told: facts about the engine, and its share."""
        return ModelInfo(
            # A peer from before `oldest` takes no version but its own.
            version=PROTOCOL_VERSION if hello.oldest else hello.version,
            model=self._name,
            engine=info.name,
            emulated=info.emulated,
            vocab_size=info.vocab_size,
            max_context=info.max_context,
            block_tokens=info.block_tokens,
            kv_blocks=self._shares[hello.share],
            speculates=speculates,
            oldest=OLDEST_VERSION,
        )
