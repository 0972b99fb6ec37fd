"""Length-prefixed frames: a pure decoder and its encoder."""

from __future__ import annotations

import struct

from tokenrouter.errors import ProtocolError

MAX_FRAME = 64 * 1024 * 1024
_LENGTH = struct.Struct("<I")


def check_size(length: int) -> None:
    """Raises ProtocolError for a payload that no peer would take."""
    if length > MAX_FRAME:
        raise ProtocolError(f"frame of {length} bytes; the limit is {MAX_FRAME}")


def frame(payload: bytes) -> bytes:
    """u32 little-endian length, then the payload."""
    check_size(len(payload))
    return _LENGTH.pack(len(payload)) + payload


class FrameDecoder:
    """Collects bytes and gives whole frames. Partial frames stay buffered, oversized ones are refused at once.

    Attributes:
        max_frame: largest payload that is taken.
    """

    def __init__(self, max_frame: int = MAX_FRAME) -> None:
        self._buffer = bytearray()
        self.max_frame = max_frame

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The frames completed by `data`.

        Raises:
            ProtocolError: a frame is announced that exceeds the limit.
        """
        self._buffer += data
        frames = []
        begin, end = 0, len(self._buffer)
        while end - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, begin)
            if length > self.max_frame:
                raise ProtocolError(f"peer announced a frame of {length} bytes; the limit is {self.max_frame}")
            stop = begin + _LENGTH.size + length
            if stop > end:
                break
            frames.append(bytes(self._buffer[begin + _LENGTH.size : stop]))
            begin = stop
        if begin:
            del self._buffer[:begin]
        return frames

    @property
    def partial(self) -> bool:
        """Whether the stream would end in the middle of a frame."""
        return bool(self._buffer)
