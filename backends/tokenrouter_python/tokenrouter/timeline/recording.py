"""What one model tells of a time that was recorded: a line of JSON about itself, then one per step and per request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from tokenrouter.errors import ProtocolError
from tokenrouter.timeline.steps import Step
from tokenrouter.timeline.trail import Trail

VERSION = 1
MOST_ENTRIES = 100_000
"""What a model keeps of one recording: about 10 MB."""
MOST_MS = 60_000
PARAMETER = "timeline_ms"
"""Request parameter that asks a model for a recording of so many milliseconds."""


class About(msgspec.Struct, array_like=True, tag=1):
    """The first line.

    Attributes:
        model: who tells.
        began_ns, ended_ns: CLOCK_MONOTONIC of the host, which all its models share.
        dropped: entries for which there was no room.
        peers: names of the orchestrators by number, as `steps.Member` has them.
    """

    version: int
    model: str
    began_ns: int
    ended_ns: int
    dropped: int = 0
    peers: dict[int, str] = {}


_Line: TypeAlias = About | Step | Trail
_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[_Line] = msgspec.json.Decoder(_Line)


@dataclass
class Recording:
    """Of one model: its steps, and the requests of its orchestrator (an LLM has one for direct calls)."""

    about: About
    steps: Sequence[Step] = field(default_factory=list)
    trails: Sequence[Trail] = field(default_factory=list)

    def lines(self) -> Iterator[bytes]:
        """As it travels. One by one, so that a thread that encodes them keeps nobody waiting."""
        for line in (self.about, *self.steps, *self.trails):
            yield _encoder.encode(line)

    @classmethod
    def read(cls, text: str) -> Recording:
        """From the lines.

        Raises:
            ProtocolError: it is no recording, or of another version.
        """
        try:
            lines = [_decoder.decode(line) for line in text.encode().splitlines()]
        except msgspec.DecodeError as exc:
            raise ProtocolError(f"the server answers something else than a recording: {exc}") from exc
        if not lines or not isinstance(lines[0], About) or lines[0].version != VERSION:
            raise ProtocolError("the server answers with a recording of another version: use the server's own command")
        return cls(
            lines[0],
            [line for line in lines if isinstance(line, Step)],
            [line for line in lines if isinstance(line, Trail)],
        )
