"""Which carrier the processes of a deployment need: this host's sockets, those between hosts, or both in one loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from tokenrouter.channel.address import Address
from tokenrouter.channel.dialling import Dialler
from tokenrouter.channel.sockets import Listener, SocketCarrier
from tokenrouter.channel.tcp import Network, Service
from tokenrouter.channel.tls import TlsSettings
from tokenrouter.channel.unix import UnixListener, socket_path


def dialling(
    name: str,
    models: Mapping[str, Address | None],
    directory: Path,
    *,
    tls: TlsSettings,
    repository: Callable[[], str],
) -> SocketCarrier:
    """The carrier of an orchestrator.

    Args:
        name: of its model.
        models: whom it dials, by name, with the address of those on other hosts.
        directory: of this host's sockets.
        tls: see `TlsSettings`.
        repository: the digest of this host's repository; asked for only if there are other hosts.

    Raises:
        ConfigError: the certificates cannot be read.
    """
    remote = {model: address for model, address in models.items() if address is not None}
    return SocketCarrier(
        dial=[Dialler(model, socket_path(directory, model)) for model in models if model not in remote],
        remote=remote,
        network=Network.of(tls, name=name, repository=repository()) if remote else None,
    )


def serving(
    name: str,
    directory: Path,
    *,
    public: Address | None,
    listen: Address | None,
    tls: TlsSettings,
    repository: Callable[[], str],
    patience_s: float = 0.0,
) -> SocketCarrier:
    """The carrier of a subserver: for this host always, for others if the model has an address.

    Args:
        name: of its model.
        directory: of this host's sockets.
        public: where others find it; None: nowhere.
        listen: where it listens, if that is somewhere else.
        tls, repository: see `dialling`.
        patience_s: how long a predecessor may still serve the model.

    Raises:
        ConfigError: somebody serves it already, it cannot be served here, or the certificates cannot be read.
    """
    listeners: list[Listener] = [UnixListener(socket_path(directory, name), patience_s=patience_s)]
    if public is not None:
        try:
            network = Network.of(tls, name=name, repository=repository())
            listeners.append(Service(network, public, listen).open(patience_s=patience_s))
        except BaseException:
            listeners[0].close()
            raise
    return SocketCarrier(listeners=listeners)
