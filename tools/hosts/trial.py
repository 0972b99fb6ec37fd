"""A copy of a repository whose large model is on another host, and certificates for both."""

from __future__ import annotations

import shutil
from datetime import timedelta
from pathlib import Path

from msgspec.structs import replace

from tokenrouter.channel.address import Address
from tokenrouter.channel.tls import TlsSettings
from tokenrouter.errors import ConfigError
from tools.build_repository.build import built_deployment, write_repository
from tools.build_repository.hosts import host_problems
from tools.certificates import write_certificates

ENTRY_NAME = "entry.example"


def write_trial(
    source: Path, target: Path, model: str, *, public: Address, listen: Address, silence_s: float = 30.0
) -> Path:
    """Writes the copy. Returns its folder.

    Args:
        source: a repository that the builder wrote.
        target: folder that is not there yet.
        model: whose host is another one.
        public: where the entry model dials it.
        listen: where it listens.
        silence_s: see `TlsSettings.silence_seconds`.

    Raises:
        ConfigError: the builder did not write the repository, or it has no such model.
    """
    spec = built_deployment(source)
    if model not in spec.models:
        raise ConfigError(f"{source} has no model {model!r}; it has {', '.join(spec.models)}")
    models = {**spec.models, model: replace(spec.models[model], host=str(public), listen=str(listen))}
    tls = TlsSettings(peers=(ENTRY_NAME,), silence_seconds=silence_s)
    moved = replace(spec, models=models, tls=tls)
    for problem in host_problems(moved):
        raise ConfigError(problem)
    shutil.copytree(source, target, symlinks=True)
    write_repository(moved, target)
    return target


def write_trial_certificates(folder: Path, public: Address, listen: Address) -> dict[str, Path]:
    """A folder for each of the two hosts."""
    hosts = {"entry": [ENTRY_NAME], "far": sorted({public.host, listen.host})}
    write_certificates(folder, hosts, lasts=timedelta(days=1))
    return {name: folder / name for name in hosts}
