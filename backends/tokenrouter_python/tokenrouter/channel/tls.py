"""Mutual TLS 1.3 from PEM files: who may talk to whom between hosts."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import msgspec

from tokenrouter.errors import ConfigError, ProtocolError

log = logging.getLogger(__name__)

FOLDER_VARIABLE = "TOKENROUTER_TLS_FOLDER"
"""Names the folder of this host's certificate instead of the repository, which is the same on all hosts."""
CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"
"""Files of the folder, named as Kubernetes names those of a TLS secret."""
_READ = 1 << 18
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0.1, le=3600)]


class TlsSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How hosts trust each other, and how soon they give up on each other; `tls` in a deployment's YAML file.

    Attributes:
        mode: ``mtls``, or ``mesh``: plain TCP inside a service mesh that itself encrypts and authenticates.
        folder: of ca.crt, tls.crt and tls.key, on every host its own; TOKENROUTER_TLS_FOLDER overrides it.
        peers: names that the certificate of an entry model's host may have: DNS names, IP addresses, or URIs as those
            of SPIFFE.
        user_timeout_seconds: a connection is over if sent bytes are not acknowledged for so long.
        silence_seconds: a peer that says nothing for so long hangs. A step of an engine counts as silence.
    """

    mode: Literal["mtls", "mesh"] = "mtls"
    folder: str = "/etc/tokenrouter/tls"
    peers: tuple[str, ...] = ()
    user_timeout_seconds: Seconds = 5.0
    silence_seconds: Seconds = 30.0


class Certificates:
    """The files of a folder, read again whenever they have changed. What cannot be read leaves the last ones in force.

    Args:
        folder: see `TlsSettings.folder`.

    Raises:
        ConfigError: a file is missing, or they do not fit each other.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._state = self._look()
        self._contexts = self._load()

    def server(self) -> ssl.SSLContext:
        """For connections that were accepted."""
        self._refresh()
        return self._contexts[0]

    def client(self) -> ssl.SSLContext:
        """For connections that were dialled."""
        self._refresh()
        return self._contexts[1]

    def _refresh(self) -> None:
        try:
            state = self._look()
            if state != self._state:
                self._state = state
                self._contexts = self._load()
                log.info("certificates read again from %s", self._folder)
        except ConfigError as exc:
            log.error("the certificates read before stay in force: %s", exc)

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        try:
            states = [(self._folder / name).stat() for name in (CA, CERTIFICATE, KEY)]
        except OSError as exc:
            raise ConfigError(
                f"{exc.filename}: {exc.strerror}; tls.folder ({FOLDER_VARIABLE}) needs {CA}, {CERTIFICATE} and {KEY}; "
                "for a trial python -m tools.certificates writes them"
            ) from exc
        return tuple((state.st_ino, state.st_size, state.st_mtime_ns) for state in states)

    def _load(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.verify_mode = ssl.CERT_REQUIRED
        server.num_tickets = 0
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            try:
                context.load_verify_locations(self._folder / CA)
            except (OSError, ValueError) as exc:
                raise ConfigError(f"{self._folder / CA} is no PEM file of certificates: {_reason(exc)}") from exc
            try:
                # A password would be asked for on the terminal.
                context.load_cert_chain(self._folder / CERTIFICATE, self._folder / KEY, password=_no_password)
            except (OSError, ValueError) as exc:
                files = f"{self._folder / CERTIFICATE} and {KEY}"
                raise ConfigError(f"{files} are no certificate and its key in PEM: {_reason(exc)}") from exc
        return server, client


def _no_password() -> str:
    raise ValueError("the key is encrypted; give one without a password")


class Tls:
    """One connection's cipher: TLS over memory, so that bytes move as on any other socket.

    Args:
        context: of `Certificates`.
        dialled: name that was dialled, which the peer's certificate has to be of; "" if the peer dialled us.
    """

    def __init__(self, context: ssl.SSLContext, *, dialled: str = "") -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=not dialled, server_hostname=dialled or None
        )
        self.ready = False

    def decrypt(self, data: bytes | memoryview) -> bytes:
        self._incoming.write(data)
        try:
            if not self.ready:
                self._tls.do_handshake()
                self.ready = True
            return self._read()
        except ssl.SSLWantReadError:
            return b""
        except ssl.SSLError as exc:
            raise ProtocolError(why_no_tls(exc)) from exc

    def _read(self) -> bytes:
        parts = []
        try:
            while part := self._tls.read(_READ):
                parts.append(part)
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            pass
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def encrypt(self, data: bytes) -> None:
        try:
            self._tls.write(data)
        except ssl.SSLError as exc:
            raise ProtocolError(why_no_tls(exc)) from exc

    def take(self) -> bytes:
        return self._outgoing.read()

    def names(self) -> Collection[str]:
        certificate = self._tls.getpeercert() or {}
        names: list[tuple[str, str]] = list(certificate.get("subjectAltName", ()))  # type: ignore[arg-type]
        return {value for kind, value in names if kind in ("DNS", "URI", "IP Address")}


_ALERTS = {
    "UNKNOWN_CA": "the peer does not know the CA of our certificate (ca.crt there, tls.crt here)",
    "CERTIFICATE_EXPIRED": "the peer says that our certificate (tls.crt) has expired; replace it",
    "CERTIFICATE_REQUIRED": "the peer asks for a certificate",
    "BAD_CERTIFICATE": "the peer refuses our certificate (tls.crt)",
    "CERTIFICATE_UNKNOWN": "the peer refuses our certificate (tls.crt)",
}
_PLAIN = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG")


def why_no_tls(exc: ssl.SSLError) -> str:
    """What went wrong, and who has to look where."""
    reason = exc.reason or str(exc)
    if isinstance(exc, ssl.SSLCertVerificationError):
        text = exc.verify_message.rstrip(".")
        return f"the peer's certificate is refused: {text} (our ca.crt, its tls.crt, and the name in models.*.host)"
    if reason in _PLAIN:
        return "the peer does not speak TLS (tls.mode has to be the same on every host)"
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return "the peer has no certificate"
    known = [text for alert, text in _ALERTS.items() if alert in reason]
    return known[0] if known else f"TLS failed: {reason}"


def _reason(exc: Exception) -> str:
    if isinstance(exc, ssl.SSLError):
        return (exc.reason or str(exc)).lower().replace("_", " ")
    return str(getattr(exc, "strerror", None) or exc)
