"""Messages on their way out: what of them can travel, and to whom they go together."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from tokenrouter.channel.carrier import Carrier
from tokenrouter.channel.framing import check_size
from tokenrouter.errors import ProtocolError
from tokenrouter.messages import ModelInfo, Outcome, Report, ReportRow, ToSubserver, encode

log = logging.getLogger(__name__)


def encoded(message: ToSubserver | Report | ModelInfo) -> bytes:
    """Raises ProtocolError for a message that cannot travel."""
    payload = encode(message)
    check_size(len(payload))
    return payload


def send_all(carrier: Carrier, messages: Iterable[tuple[int, bytes]]) -> None:
    """All messages to a peer at once: requests that a step hands over together must be able to start together."""
    by_peer: dict[int, list[bytes]] = {}
    for peer, payload in messages:
        by_peer.setdefault(peer, []).append(payload)
    for peer, payloads in by_peer.items():
        carrier.send(peer, *payloads)


def reported(message: Report | ModelInfo) -> list[bytes]:
    """A report's frames. Rows that cannot travel become failures of their requests; the others go on their own then."""
    try:
        return [encoded(message)]
    except ProtocolError:
        if isinstance(message, ModelInfo):
            raise
        log.exception("a report cannot be sent as it is")
        return [_row_alone(message.at_ns, row) for row in message.rows]


def _row_alone(at_ns: int, row: ReportRow) -> bytes:
    try:
        return encoded(Report(at_ns, [row]))
    except ProtocolError as exc:
        text = str(exc).encode("ascii", "backslashreplace").decode()
        failure = ReportRow(row.request, row.visit, Outcome.FAILED, [], error=(exc.slug, text))
        return encoded(Report(at_ns, [failure]))
