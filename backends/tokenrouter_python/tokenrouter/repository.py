"""A Triton model repository: which models it has, what configures each, where their checkpoints lie."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenrouter.channel.address import Address
from tokenrouter.config.entry import EntryConfig, entry_config
from tokenrouter.config.model_yaml import ModelYaml
from tokenrouter.config.roles import ENTRY_ROLES, role_of
from tokenrouter.config.subserver import SubserverConfig, subserver_config
from tokenrouter.errors import ConfigError

BACKEND = "tokenrouter_python"


class Repository:
    """Read when asked, never cached: files may change between two questions.

    Example::

        repository = Repository("model_repository")
        for name, model in repository.models(repository.entry()).items():
            print(name, model.engine, model.checkpoint)

    Args:
        root: its folder.
        configs: configuration of models as Triton handed it over, which counts instead of their config.pbtxt: it may
            have come with a load request.
        versions: version folders of models that Triton chose, instead of the newest.

    Raises:
        ConfigError: there is no such folder.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        configs: Mapping[str, Mapping[str, Any]] | None = None,
        versions: Mapping[str, str] | None = None,
    ) -> None:
        self.root = Path(root).resolve()
        if not self.root.is_dir():
            raise ConfigError(f"{root}: no such folder; name a model repository")
        self._configs = configs or {}
        self._versions = versions or {}

    def names(self) -> list[str]:
        """All models, sorted."""
        return sorted({path.parent.name for path in self.root.glob("*/config.pbtxt")} | self._configs.keys())

    def config(self, name: str) -> Mapping[str, Any]:
        """config.pbtxt as the dict that Triton hands to a backend.

        Raises:
            ConfigError: the file is missing or broken.
        """
        return self._configs.get(name) or _read_pbtxt(self.root / name / "config.pbtxt")

    def entry(self, name: str | None = None) -> EntryConfig:
        """The entry model of this name, or what stands beside it (`ENTRY_ROLES`); without one, the only entry model.

        Raises:
            ConfigError: there is none, or more than one without a name, or its configuration is wrong.
        """
        if name is None:
            entries = self._entries()
            if len(entries) != 1:
                raise ConfigError(f"{self.root}: entry models: {', '.join(entries) or 'none'}; name one with --entry")
            name = entries[0]
        elif name not in self.names() or not self._has_role(name, ENTRY_ROLES):
            raise ConfigError(f"{self.root}: no entry model {name!r}; there is {', '.join(self._entries()) or 'none'}")
        return entry_config(self.config(name))

    def entries_to(self, model: str) -> list[EntryConfig]:
        """Entry models that route to this model or replica; a config.pbtxt that Triton will not load is passed over.

        Raises:
            ConfigError: the configuration of an entry model is wrong.
        """
        entries = []
        for name in self.names():
            try:
                if not self._is_entry(name):
                    continue
            except ConfigError:
                continue
            entries.append(entry_config(self.config(name)))
        return [entry for entry in entries if any(model in names for names in entry.all_replicas.values())]

    def model(self, name: str) -> SubserverConfig:
        """A model that entry models route to.

        Raises:
            ConfigError: names the file and the field.
        """
        return subserver_config(self.config(name), self.version(name))

    def models(self, entry: EntryConfig) -> dict[str, SubserverConfig]:
        """The models between which an entry model routes, small first, each with all its replicas.

        Raises:
            ConfigError: one is not in the repository, or wrong.
        """
        known = self.names()
        replicas = [(name, model) for model, names in entry.all_replicas.items() for name in names]
        if missing := [name for name, _ in replicas if name not in known]:
            raise ConfigError(f"{self.root}: {entry.name} routes to {missing[0]!r}, which is not in the repository")
        found = {name: self.model(name) for name, _ in replicas}
        for name, model in replicas:
            if found[name].model != model:
                raise ConfigError(
                    f"{self.root / name / 'config.pbtxt'}: {entry.name} takes it for a replica of {model!r}; set its "
                    f"parameter replica_of to that (it is {found[name].replica_of!r})"
                )
        return found

    def version(self, name: str) -> Path:
        """The version folder of a model.

        Raises:
            ConfigError: there is none.
        """
        if name in self._versions:
            return self.root / name / self._versions[name]
        versions = [path for path in self.root.glob(f"{name}/*") if path.is_dir() and path.name.isdecimal()]
        if not versions:
            raise ConfigError(f"{self.root / name} has no version folder (1/); is the model named correctly?")
        return max(versions, key=lambda path: int(path.name))

    def checkpoint(self, name: str) -> Path:
        """The folder of a model's checkpoint.

        Raises:
            ConfigError: its model.yaml is wrong.
        """
        return ModelYaml.read(self.version(name)).checkpoint

    def engines(self, host: str | None = None) -> list[str]:
        """The engine of every model that has one; a model.yaml that will not load is passed over.

        Args:
            host: only of models on this host, named as in `host`.
        """
        engines = []
        for name in self.names():
            try:
                if host is None or self.host(name) == host:
                    engines.append(ModelYaml.read(self.version(name)).engine)
            except ConfigError:
                continue
        return engines

    def host(self, name: str) -> str:
        """The host of a model, without its port; "" for that of the entry model.

        Raises:
            ConfigError: its config.pbtxt is broken.
        """
        text = str(self.config(name).get("parameters", {}).get("host", {}).get("string_value", ""))
        try:
            return Address.parse(text).host if text else ""
        except ValueError as exc:
            raise ConfigError(f"{self.root / name / 'config.pbtxt'}: parameter host: {exc}") from exc

    def digest(self) -> str:
        """Of everything that has to be the same on all hosts of a deployment, or its tokens would be others.

        That is who routes between whom, by which policy, and what of each model tells one engine or checkpoint from
        another. Thresholds, limits and addresses may differ. A model that will not load is passed over.
        """
        digest = hashlib.sha256()
        for name in self.names():
            try:
                facts = self._facts(name)
            except (ConfigError, OSError):
                continue
            digest.update(json.dumps([name, facts], sort_keys=True, default=str).encode())
        return digest.hexdigest()

    def _facts(self, name: str) -> dict[str, Any]:
        if self._has_role(name, ("subserver",)):
            model = ModelYaml.read(self.version(name))
            files = [model.checkpoint / file for file in ("config.json", "tokenizer.json")]
            # Where it lies, and on which GPU, is this host's own business.
            options = {key: value for key, value in model.options.items() if key not in ("device", "threads")}
            return {"engine": model.engine, "options": options, "files": _contents(files)}
        if not self._has_role(name, ENTRY_ROLES):
            return {}
        entry = entry_config(self.config(name))
        routers = sorted(path for path in self.root.glob(f"{name}/*/routers/*") if path.is_file())
        return {
            "models": entry.all_replicas,
            "policy": [entry.policy.name, json.loads(entry.policy.params)],
            "end_ids": entry.end_ids,
            "files": _contents(routers),
        }

    def _entries(self) -> list[str]:
        return [name for name in self.names() if self._is_entry(name)]

    def _is_entry(self, name: str) -> bool:
        return self._has_role(name, ("orchestrator",))

    def _has_role(self, name: str, roles: Collection[str]) -> bool:
        config = self.config(name)
        return config.get("backend") == BACKEND and role_of(config) in roles


def _contents(paths: Iterable[Path]) -> list[tuple[str, str]]:
    """Names and digests of files, of those that are there."""
    return [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths if path.is_file()]


def _read_pbtxt(path: Path) -> dict[str, Any]:
    # They bring gRPC along, which a server's process needs for nothing else.
    from google.protobuf import text_format
    from google.protobuf.json_format import MessageToDict
    from tritonclient.grpc import model_config_pb2

    try:
        message = text_format.Parse(path.read_text("utf-8"), model_config_pb2.ModelConfig())
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
    except text_format.ParseError as exc:
        raise ConfigError(f"{path} is not a valid model configuration: {exc}") from exc
    config: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    config.setdefault("name", path.parent.name)
    return config
