"""One server with an entry model for every way to its large model: this host's socket, TLS, TLS over slow links.

All go to the same two models, so that nothing but the way differs; one is used at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
from msgspec.structs import replace

from tokenrouter.channel.address import Address
from tokenrouter.channel.tls import FOLDER_VARIABLE, TlsSettings
from tools.build_repository.build import built_deployment, write_repository
from tools.build_repository.pbtxt import entry_pbtxt
from tools.build_repository.spec import DeploymentSpec
from tools.certificates import write_certificates
from tools.hosts.relay import Relay
from tools.tritonserver.ports import free_port
from tools.tritonserver.server import TritonServer

_HOST = "127.0.0.1"


@dataclass(frozen=True)
class Way:
    """An entry model, by the way that its hand-offs take.

    Attributes:
        name: of the entry model.
        label: for tables.
        delay_ms: of the link, one way; None without a link of ours.
    """

    name: str
    label: str
    delay_ms: float | None = None


UNIX = Way("tokenrouter", "Unix socket")
TLS = Way("tls", "TLS, loopback")


def delayed(delay_ms: float) -> Way:
    """TLS over a link with this delay."""
    return Way(f"tls_{delay_ms:g}".replace(".", "_"), f"TLS, link of {delay_ms:g} ms", delay_ms)


@contextmanager
def serve(write: Callable[[Path], Path], ways: Sequence[Way], model: str) -> Iterator[TritonServer]:
    """A running server with these ways to `model`.

    Args:
        write: writes the deployment's repository, with the entry model `tokenrouter`.
        ways: the first is `UNIX`.
        model: which one is on another host.
    """
    with tempfile.TemporaryDirectory(prefix="tokenrouter-perf-") as name, ExitStack() as stack:
        folder = Path(name)
        repository = write(folder / "repository")
        write_certificates(folder, {"keys": [_HOST]}, lasts=timedelta(days=1))
        listen = Address(_HOST, free_port(_HOST))
        spec = built_deployment(repository)
        local = entry_pbtxt(spec)
        # The models as they are seen from another host; that they have sockets, too, is not said.
        write_repository(_moved(spec, UNIX, model, listen), repository)
        (repository / UNIX.name / "config.pbtxt").write_text(local)
        for way in ways[1:]:
            address = listen
            if way.delay_ms is not None:
                relay = Relay(Address(_HOST, 0), listen, delay_s=way.delay_ms / 1e3)
                address = stack.enter_context(relay).address
            target = repository / way.name
            (target / "1").mkdir(parents=True)
            (target / "config.pbtxt").write_text(entry_pbtxt(_moved(spec, way, model, address)))
        yield stack.enter_context(TritonServer(repository, env={FOLDER_VARIABLE: str(folder / "keys")}))


def _moved(spec: DeploymentSpec, way: Way, model: str, address: Address) -> DeploymentSpec:
    tls = TlsSettings(peers=(_HOST,))
    models = {**spec.models, model: replace(spec.models[model], host=str(address))}
    entry = msgspec.structs.replace(spec.entry, name=way.name, aliases={})
    return replace(spec, models=models, entry=entry, tls=tls)
