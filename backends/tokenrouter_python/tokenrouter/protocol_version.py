"""The version of what processes say to each other, and whether two sides understand each other."""

from __future__ import annotations

from tokenrouter.errors import ProtocolError

PROTOCOL_VERSION = 3
OLDEST_VERSION = PROTOCOL_VERSION - 1
"""The oldest version that is understood: one side is upgraded after the other."""


def check_version(
    who: str, theirs: int, their_oldest: int, *, version: int = PROTOCOL_VERSION, accepts: int = OLDEST_VERSION
) -> None:
    """Whether two sides understand each other: the newer one decides.

    Args:
        who: the peer, for the message.
        theirs: the peer's version.
        their_oldest: the oldest version that the peer takes; 0 = only its own, as before version 3.
        version: ours.
        accepts: the oldest that we take.

    Raises:
        ProtocolError: says who has to be upgraded.
    """
    if theirs < accepts or (theirs > version and not 0 < their_oldest <= version):
        older, newer = ("there", "here") if theirs < version else ("here", "there")
        raise ProtocolError(
            f"{who} speaks version {theirs} of the protocol; here it is version {version}, which takes {accepts} and "
            f"newer: the release {older} is too old for the one {newer}"
        )
