"""A deployment on two hosts of one machine: two servers, a link of ours between them, certificates for both."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
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
from tools.build_repository.spec import DeploymentSpec
from tools.certificates import write_certificates
from tools.hosts.relay import Relay
from tools.tritonserver.ports import free_port
from tools.tritonserver.server import TritonServer

NEAR, FAR = "127.0.0.1", "127.0.0.2"
"""Of the entry model and the small one; of the large one, which the entry model reaches over the link."""


@dataclass
class Hosts:
    """Two hosts; nothing runs at first but the link."""

    folder: Path
    repository: Path
    keys: Path
    relay: Relay
    far_address: Address
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

    def near(self, *entries: str) -> TritonServer:
        """The entry model's host, with further entry models."""
        return self.start("tokenrouter", "small", *entries)

    def far(self) -> TritonServer:
        """The large model's host."""
        return self.start("large", keys="far")


def hosts_spec(
    small: Address, relay: Address, far: Address, *, entry: dict[str, Any] | None = None, **tls: Any
) -> DeploymentSpec:
    """The deployment: every model has an address, and `large` listens at `far`, on the other end of the link."""
    spec = emulated_spec(
        entry={"aliases": {}, **(entry or {})},
        options={"step_ms": 1.0, "margin": 2.0, "max_seq_len": 16_384, "kv_cache_config": {"max_tokens": 800_000}},
        per_model={"small": {"host": str(small)}, "large": {"host": str(relay), "listen": str(far)}},
    )
    settings = {"peers": ["entry.test"], **tls}
    return msgspec.structs.replace(spec, tls=msgspec.convert(settings, type(spec.tls)))


def trial_keys(folder: Path, *, lasts: timedelta = timedelta(days=1), **options: Any) -> Path:
    """Certificates of both hosts, and of one that nobody expects."""
    names = {"near": ["entry.test", NEAR], "far": [NEAR, FAR], "stranger": ["stranger.test", NEAR]}
    write_certificates(folder, names, lasts=lasts, **options)
    return folder


@contextmanager
def two_hosts(*entries: dict[str, Any], **tls: Any) -> Iterator[Hosts]:
    """A repository, certificates and the link; ends whatever was started.

    Args:
        entries: fields of `EntrySpec`, of each entry model.
        tls: fields of `TlsSettings`.
    """
    with tempfile.TemporaryDirectory(prefix="hosts-") as name, ExitStack() as stack:
        folder = Path(name)
        far = Address(FAR, free_port(FAR))
        relay = stack.enter_context(Relay(Address(NEAR, 0), far))
        small = Address(NEAR, free_port(NEAR, taken=[far.port, relay.address.port]))
        repository = folder / "repository"
        for entry in entries:
            write_emulated(repository, hosts_spec(small, relay.address, far, entry=entry, **tls))
        yield Hosts(folder, repository, trial_keys(folder / "keys"), relay, far, stack)
