"""What two hosts tell each other beside the frames of the loops: who they are, that they live, why they refuse.

Pure: payloads and *now* in, payloads out. A payload of the link begins with a byte with which no message begins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec

from tokenrouter.channel.clocks import Offset
from tokenrouter.errors import ProtocolError
from tokenrouter.messages import Natural
from tokenrouter.protocol_version import OLDEST_VERSION, PROTOCOL_VERSION, check_version

MARK = b"\xc1"
"""The one byte that msgpack never uses."""
_TEXT_BYTES = 2000
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=_TEXT_BYTES)]


class Greeting(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """First frame of either side.

    Attributes:
        version: of the protocol.
        oldest: the oldest version that this side takes.
        instance: a random number of this process; a second connection of the same process replaces the first.
        name: of the model.
        repository: digest of the repository (`Repository.digest`); both sides have to hold the same.
    """

    version: Natural
    oldest: Natural
    instance: Natural
    name: Text
    repository: Text


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Asks for a `Pong`; `sent_ns` is on the sender's clock."""

    sent_ns: Natural


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Answer to a `Ping`: its `sent_ns`, and the own clock."""

    sent_ns: Natural
    at_ns: Natural


class Refusal(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """The last frame of a connection: why this side closes it."""

    why: Text


class Refused(ProtocolError):
    """The peer has refused us; the text is its own."""


_Frame: TypeAlias = Greeting | Ping | Pong | Refusal
_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Frame] = msgspec.msgpack.Decoder(_Frame)


def refusal(why: str) -> bytes:
    """Payload of a `Refusal`."""
    return _payload(Refusal(why.encode("ascii", "backslashreplace").decode()[:_TEXT_BYTES]))


def refused(payload: bytes) -> str | None:
    """Why the peer refuses us, if the payload says so."""
    try:
        found = _frame(payload)
    except ProtocolError:
        return None
    return found.why if isinstance(found, Refusal) else None


def _payload(frame: _Frame) -> bytes:
    return MARK + _encoder.encode(frame)


def _frame(payload: bytes) -> _Frame:
    try:
        return _decoder.decode(payload[1:])
    except (msgspec.DecodeError, RecursionError, ValueError) as exc:
        raise ProtocolError(f"no frame of the link: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Terms:
    """What this side says of itself, and how patient it is.

    Attributes:
        name, repository, instance, version, oldest: see `Greeting`.
        ping_ns: time between two pings.
        silence_ns: a peer that says nothing for so long hangs.
    """

    name: str
    repository: str
    instance: int
    version: int = PROTOCOL_VERSION
    oldest: int = OLDEST_VERSION
    ping_ns: int = 2 * 10**9
    silence_ns: int = 30 * 10**9

    @property
    def greeting(self) -> Greeting:
        return Greeting(self.version, self.oldest, self.instance, self.name, self.repository)


class Link:
    """One side of a connection.

    Args:
        terms: of this side.
        expected: name of the model that was dialled; "" if the peer dialled us.

    Attributes:
        outbox: payloads to send.
        peer: the peer's greeting; None while it has said nothing that was accepted.
        offset: of the peer's clock.
        due_ns: when `tick` has something to do.
    """

    def __init__(self, terms: Terms, *, expected: str, now_ns: int) -> None:
        self._terms = terms
        self._expected = expected
        self._heard_ns = now_ns
        self._ping_ns = now_ns
        self.outbox: list[bytes] = [_payload(terms.greeting)]
        self.peer: Greeting | None = None
        self.offset = Offset()
        self.due_ns = now_ns + terms.silence_ns

    def receive(self, payloads: list[bytes], *, now_ns: int) -> list[bytes]:
        """What the peer sent, without the link's own payloads.

        Raises:
            Refused: the peer refuses us.
            ProtocolError: the peer is none that we can talk to; tell it why.
        """
        self._heard_ns = now_ns
        rest = []
        for payload in payloads:
            if payload[:1] == MARK:
                self._hear(_frame(payload), now_ns)
            elif self.peer is None:
                raise ProtocolError("the first frame is no greeting")
            else:
                rest.append(payload)
        return rest

    def tick(self, *, now_ns: int) -> None:
        """Pings when it is time.

        Raises:
            ProtocolError: the peer has said nothing for too long.
        """
        silent_ns = now_ns - self._heard_ns
        if silent_ns >= self._terms.silence_ns:
            raise ProtocolError(f"it has said nothing for {silent_ns * 1e-9:.0f} s (tls.silence_seconds)")
        if self.peer is not None and now_ns >= self._ping_ns:
            self.outbox.append(_payload(Ping(now_ns)))
            self._ping_ns = now_ns + self._terms.ping_ns
        self._plan()

    def _hear(self, frame: _Frame, now_ns: int) -> None:
        if isinstance(frame, Refusal):
            raise Refused(frame.why)
        if isinstance(frame, Greeting):
            self._greeted(frame, now_ns)
        elif self.peer is None:
            raise ProtocolError("the first frame is no greeting")
        elif isinstance(frame, Ping):
            self.outbox.append(_payload(Pong(frame.sent_ns, now_ns)))
        else:
            self.offset.pong(sent_ns=frame.sent_ns, peer_ns=frame.at_ns, now_ns=now_ns)

    def _greeted(self, greeting: Greeting, now_ns: int) -> None:
        terms, who = self._terms, repr(greeting.name)
        if self.peer is not None:
            raise ProtocolError(f"{who} greeted twice")
        check_version(who, greeting.version, greeting.oldest, version=terms.version, accepts=terms.oldest)
        if self._expected not in ("", greeting.name):
            raise ProtocolError(f"model {self._expected!r} was expected here, but {who} answers: see models.*.host")
        if greeting.repository != terms.repository:
            raise ProtocolError(
                f"{who} has another model repository (digest {greeting.repository[:12]}) than {terms.name!r} "
                f"(digest {terms.repository[:12]}); every host needs the same: build it once and copy it"
            )
        self.peer = greeting
        self._ping_ns = now_ns
        self._plan()

    def _plan(self) -> None:
        silent_ns = self._heard_ns + self._terms.silence_ns
        self.due_ns = silent_ns if self.peer is None else min(self._ping_ns, silent_ns)
