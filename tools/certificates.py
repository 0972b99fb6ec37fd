"""`python -m tools.certificates --output certificates --name entry=127.0.0.1 --name large=127.0.0.2`: for a trial.

Writes a certificate authority of its own and, for every name, a folder with ca.crt, tls.crt and tls.key: what `tls` of
a deployment needs on one host. An authority that is in the folder already signs again: so certificates are replaced.
Its key is there for whoever can read the folder: real deployments take certificates from cert-manager, SPIFFE or an
authority of the house.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated

import typer

from tokenrouter.channel.tls import CA, CERTIFICATE, KEY
from tools.errors import CommandError, reported
from tools.targets import target_folder

try:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError as exc:
    raise SystemExit(f"error: tools.certificates needs {exc.name}: pip install cryptography") from exc

_CA_KEY = "ca.key"
_CA_DAYS = 3650
# So that hosts whose clocks differ a little agree.
_EARLIER = timedelta(minutes=5)


def write_certificates(
    folder: Path, hosts: Mapping[str, Sequence[str]], *, begins: datetime | None = None, lasts: timedelta
) -> None:
    """Writes the authority, if it is not there yet, and a folder for each of `hosts`.

    Args:
        folder: where to.
        hosts: by name of the folder, the DNS names, IP addresses and URIs that the certificate is of.
        begins: when it becomes valid; now by default.
        lasts: for how long.

    Raises:
        CommandError: a name is none, or the folder has half an authority.
    """
    begins = begins or datetime.now(timezone.utc) - _EARLIER
    names = {host: [_general_name(name) for name in given] for host, given in hosts.items()}
    folder.mkdir(parents=True, exist_ok=True)
    key, authority = _authority(folder)
    for host, alternatives in names.items():
        own = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(host, own, begins, begins + lasts).issuer_name(authority.subject)
        usage = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = builder.add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        builder = builder.add_extension(usage, critical=False)
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False
        )
        target = folder / host
        target.mkdir(exist_ok=True)
        _write_key(target / KEY, own)
        _write(target / CERTIFICATE, _pem(builder.sign(key, hashes.SHA256())))
        _write(target / CA, _pem(authority))


def _authority(folder: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key_path, path = folder / _CA_KEY, folder / CA
    if key_path.exists() != path.exists():
        raise CommandError(f"{folder} has only one of {CA} and {_CA_KEY}; remove it, or name another --output")
    if path.exists():
        key = serialization.load_pem_private_key(key_path.read_bytes(), None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise CommandError(f"{key_path} is none that this command wrote; name another --output")
        return key, x509.load_pem_x509_certificate(path.read_bytes())
    key = ec.generate_private_key(ec.SECP256R1())
    begins = datetime.now(timezone.utc) - timedelta(days=1)
    builder = _builder("TokenRouter trial", key, begins, begins + timedelta(days=_CA_DAYS))
    builder = builder.issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "TokenRouter trial")]))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate = builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    ).sign(key, hashes.SHA256())
    _write_key(key_path, key)
    _write(path, _pem(certificate))
    return key, certificate


def _builder(name: str, key: ec.EllipticCurvePrivateKey, begins: datetime, ends: datetime) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
    )


def _general_name(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        pass
    if not name or not all(sign.isascii() and (sign.isalnum() or sign in "-.*_") for sign in name):
        raise CommandError(f"--name: {name!r} is no DNS name, IP address or URI")
    return x509.DNSName(name)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    _write(path, pem)


def _write(path: Path, data: bytes) -> None:
    """As a whole: whoever reads at the same time finds the old file or the new one."""
    other = path.with_name(f".{path.name}.new")
    other.unlink(missing_ok=True)
    with os.fdopen(os.open(other, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(data)
    other.replace(path)


def _hosts(given: Sequence[str]) -> dict[str, list[str]]:
    hosts: dict[str, list[str]] = {}
    for text in given:
        host, _, names = text.partition("=")
        if not host or "/" in host or host in hosts or host.startswith("."):
            raise CommandError(f"--name {text}: give FOLDER=NAME,NAME, each folder once")
        hosts[host] = [name.strip() for name in (names or host).split(",")]
    return hosts


@reported()
def main(
    output: Annotated[
        Path, typer.Option(help="Folder of the authority and the certificates.", callback=target_folder())
    ],
    name: Annotated[
        list[str],
        typer.Option(
            help="FOLDER=NAME,NAME: a certificate's folder, and the names or addresses of its host; repeated."
        ),
    ],
    days: Annotated[float, typer.Option(min=0.0001, help="How long the certificates are valid.")] = 30.0,
) -> None:
    """Writes certificates for a trial, and says how to use them."""
    hosts = _hosts(name)
    write_certificates(output, hosts, lasts=timedelta(days=days))
    for host, names in hosts.items():
        print(f"{output / host}: {', '.join(names)}")


if __name__ == "__main__":
    typer.run(main)
