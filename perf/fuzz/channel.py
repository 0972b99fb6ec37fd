"""A local peer of the same user that writes malformed traffic into the sockets of a running deployment."""

from __future__ import annotations

import random
import socket
import time
from pathlib import Path

from perf.fuzz.answers import Answers
from perf.fuzz.frames import traffic

_READ = 1 << 16


def attack(sockets: Path, draw: random.Random, patience_s: float) -> str:
    """One connection to one of the models: writes, says that this was all, and reads to the end.

    Returns how it went: ``dropped`` without a word, ``dropped after an answer``, or ``unanswered``: still open when the
    peer's patience ends although it has said its last word.
    """
    path = draw.choice(sorted(sockets.glob("*.sock")))
    greeting, rest = traffic(draw)
    answered = False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(patience_s)
        try:
            peer.connect(str(path))
            if greeting:
                peer.sendall(greeting)
                answered = bool(peer.recv(_READ))
            peer.sendall(rest)
            peer.shutdown(socket.SHUT_WR)
            while peer.recv(_READ):
                answered = True
        except TimeoutError:
            return "unanswered"
        except OSError:
            pass  # reset while we wrote
    return "dropped after an answer" if answered else "dropped"


class ChannelSender:
    """An `attack` with every call, each on a connection of its own."""

    def __init__(self, sockets: Path, answers: Answers, patience_s: float) -> None:
        self._sockets, self._answers, self._patience_s = sockets, answers, patience_s

    def __call__(self, draw: random.Random) -> None:
        """One attack, noted."""
        began_s = time.monotonic()
        outcome = attack(self._sockets, draw, self._patience_s)
        self._answers.note("traffic", outcome, time.monotonic() - began_s, answered=outcome != "unanswered")

    def close(self) -> None:
        """Nothing is open between calls."""
