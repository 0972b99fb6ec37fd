"""Models on other hosts than the entry model: what the repository says of them, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from tokenrouter.channel.address import Address
from tokenrouter.channel.tls import TlsSettings
from tools.build_repository.replicas import expanded
from tools.build_repository.spec import DeploymentSpec, ModelSpec


def addresses(models: Mapping[str, ModelSpec]) -> dict[str, str]:
    """Where replicas on other hosts listen, by name."""
    return {name: str(Address.parse(str(own.host))) for name, own in expanded(models).items() if own.host}


def entry_parameters(models: Mapping[str, ModelSpec], tls: TlsSettings) -> dict[str, str]:
    """Parameters of an entry model; none if all models are on its host."""
    found = addresses(models)
    return {"hosts": msgspec.json.encode(found).decode(), "tls": _tls(tls)} if found else {}


def model_parameters(model: ModelSpec, tls: TlsSettings) -> dict[str, str]:
    """Parameters of one replica; none if it is on the entry model's host."""
    if not model.host:
        return {}
    public = Address.parse(str(model.host))
    parameters = {"host": str(public), "tls": _tls(tls)}
    if model.listen:
        parameters["listen"] = str(Address.parse(model.listen, port=public.port))
    return parameters


def _tls(tls: TlsSettings) -> str:
    return msgspec.json.encode(tls).decode()


def host_problems(spec: DeploymentSpec) -> Iterator[str]:
    """Addresses that are none or stand twice, and certificates that nobody could have."""
    problems = [problem for name, model in spec.models.items() for problem in _model_problems(name, model)]
    yield from problems
    if problems:
        return
    found = addresses(spec.models)
    for name, address in found.items():
        others = [other for other, at in found.items() if at == address and other < name]
        if others:
            yield f"models.{name}.host is {address}, which is that of {others[0]}; give each its own port"
    if found and spec.tls.mode == "mtls" and not spec.tls.peers:
        yield (
            "tls.peers is empty, so no model would let the entry model in; name what its host's certificate is of, "
            "such as [entry.example], or set tls.mode: mesh inside a service mesh that is strict about mutual TLS"
        )
    if spec.tls != TlsSettings() and not found:
        yield "tls is given, but no models.*.host; leave it out, or say which model is on another host"


def _model_problems(name: str, model: ModelSpec) -> Iterator[str]:
    hosts = (model.host,) if isinstance(model.host, str) else model.host
    if hosts != ("",) and len(hosts) != model.replicas:
        yield f"models.{name}.host names {len(hosts)} hosts for {model.replicas} replicas; give a list, one for each"
    for field, text in (*(("host", host) for host in hosts), ("listen", model.listen)):
        try:
            if text:
                Address.parse(text)
        except ValueError as exc:
            yield f"models.{name}.{field}: {exc}"
    if model.listen and hosts == ("",):
        yield f"models.{name}.listen is {model.listen!r} without a host; say in models.{name}.host where others find it"
