"""Deployments on several hosts of one machine: a server each, certificates for all, between two a link of ours."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec

from perf.emulated.repository import write_emulated
from tests.support.repositories import emulated_spec
from tokenrouter.channel.address import Address
from tokenrouter.channel.tls import FOLDER_VARIABLE
from tokenrouter.metrics_page import scrape
from tools.build_repository.spec import DeploymentSpec
from tools.certificates import write_certificates
from tools.hosts.relay import Relay
from tools.tritonserver.ports import free_port
from tools.tritonserver.server import TritonServer

NEAR, FAR, FARTHER = "127.0.0.1", "127.0.0.2", "127.0.0.3"
"""Of the entry model and the small one; of the large one, which the entry model reaches over the link; of a replica."""


@dataclass
class Servers:
    """Servers of one repository, of which none runs at first."""

    repository: Path
    keys: Path
    stack: ExitStack = field(repr=False)

    def server(self, *models: str, keys: str = "near") -> TritonServer:
        """A server of these models, not started."""
        return TritonServer(
            self.repository,
            env={FOLDER_VARIABLE: str(self.keys / keys)},
            extra_args=["--model-control-mode=explicit", *(f"--load-model={name}" for name in models)],
            exit_timeout_s=4,
        )

    def start(self, *models: str, **options: Any) -> TritonServer:
        """A running server of these models."""
        return self.stack.enter_context(self.server(*models, **options))

    def near(self, *more: str) -> TritonServer:
        """The entry model's host, with further models."""
        return self.start("tokenrouter", "small", *more)

    def far(self, model: str = "large") -> TritonServer:
        """Another host, of one model."""
        return self.start(model, keys="far")


@dataclass
class Hosts(Servers):
    """Two hosts, and the link that the entry model takes to the other one; it runs."""

    relay: Relay
    far_address: Address


def connected(server: TritonServer, model: str = "large") -> bool:
    """Whether the entry model of this server is connected with a model, or replica."""
    page = scrape(server.metrics_url, "tokenrouter_connected")
    return page.value("tokenrouter_connected", model="tokenrouter", subserver=model) == 1


def hosts_spec(models: dict[str, dict[str, Any]], *, entry: dict[str, Any] | None = None, **tls: Any) -> DeploymentSpec:
    """The deployment.

    Args:
        models: where `small` and `large` are: fields of `ModelSpec`.
        entry: fields of `EntrySpec`.
        tls: fields of `TlsSettings`.
    """
    spec = emulated_spec(
        entry={"aliases": {}, **(entry or {})},
        options={"step_ms": 1.0, "margin": 2.0, "max_seq_len": 16_384, "kv_cache_config": {"max_tokens": 800_000}},
        per_model=models,
    )
    settings = {"peers": ["entry.test"], **tls}
    return msgspec.structs.replace(spec, tls=msgspec.convert(settings, type(spec.tls)))


def trial_keys(folder: Path, *, lasts: timedelta = timedelta(days=1), **options: Any) -> Path:
    """Certificates of both hosts, and of one that nobody expects."""
    names = {"near": ["entry.test", NEAR], "far": [NEAR, FAR, FARTHER], "stranger": ["stranger.test", NEAR]}
    write_certificates(folder, names, lasts=lasts, **options)
    return folder


@contextmanager
def two_hosts(*entries: dict[str, Any], **tls: Any) -> Iterator[Hosts]:
    """Both models have an address, and `large` listens on the other end of the link; ends whatever was started.

    Args:
        entries: fields of `EntrySpec`, of each entry model.
        tls: fields of `TlsSettings`.
    """
    with _link() as (folder, relay, far, stack):
        small = Address(NEAR, free_port(NEAR, taken=[far.port, relay.address.port]))
        models = {"small": {"host": str(small)}, "large": {"host": str(relay.address), "listen": str(far)}}
        specs = [hosts_spec(models, entry=entry, **tls) for entry in entries]
        yield Hosts(*_written(folder, specs), stack, relay, far)


@contextmanager
def beside_and_elsewhere(entry: dict[str, Any], **tls: Any) -> Iterator[Hosts]:
    """Two replicas of the large model: `large` beside the entry model, `large_1` on the other end of the link."""
    with _link() as (folder, relay, far, stack):
        large = {"replicas": 2, "host": ["", str(relay.address)], "listen": str(far)}
        yield Hosts(*_written(folder, [hosts_spec({"large": large}, entry=entry, **tls)]), stack, relay, far)


@contextmanager
def both_elsewhere(*models: str, entry: dict[str, Any], **tls: Any) -> Iterator[Servers]:
    """Two replicas of each of these models, on two hosts; the others are beside the entry model."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as name, ExitStack() as stack:
        ports: list[int] = []
        per_model = {}
        for model in models:
            ports.append(free_port(FAR, ports))
            per_model[model] = {"replicas": 2, "host": [f"{host}:{ports[-1]}" for host in (FAR, FARTHER)]}
        yield Servers(*_written(Path(name), [hosts_spec(per_model, entry=entry, **tls)]), stack)


@contextmanager
def _link() -> Iterator[tuple[Path, Relay, Address, ExitStack]]:
    """A folder, a link, what it leads to, and who ends what is started."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as name, ExitStack() as stack:
        far = Address(FAR, free_port(FAR))
        yield Path(name), stack.enter_context(Relay(Address(NEAR, 0), far)), far, stack


def _written(folder: Path, specs: Sequence[DeploymentSpec]) -> tuple[Path, Path]:
    """Repository and certificates."""
    for spec in specs:
        write_emulated(folder / "repository", spec)
    return folder / "repository", trial_keys(folder / "keys")
