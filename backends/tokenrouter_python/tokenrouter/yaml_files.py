"""YAML as people write it: what PyYAML reads, but `1e-5` is a number (YAML 1.2), and no key stands twice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tokenrouter.errors import ConfigError

_FLOAT = "tag:yaml.org,2002:float"
_MERGE = "tag:yaml.org,2002:merge"
# https://yaml.org/spec/1.2.2/#1032-tag-resolution; PyYAML wants a point and the exponent's sign, as YAML 1.1 does.
_EXPONENTIAL = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)[eE][-+]?[0-9]+$")


class DuplicateKey(yaml.YAMLError):
    """A mapping has a key twice, of which YAML libraries take the last without a word."""


class Loader(yaml.SafeLoader):
    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == _MERGE:
                continue
            line = key.start_mark.line + 1
            if first := seen.get((key.tag, key.value)):
                raise DuplicateKey(f"the key {key.value!r} stands twice, in lines {first} and {line}; keep one of them")
            seen[key.tag, key.value] = line
        return node


class Dumper(yaml.SafeDumper):
    """Writes what `Loader` reads back to the same."""


for _kind in (Loader, Dumper):
    _kind.add_implicit_resolver(_FLOAT, _EXPONENTIAL, list("-+.0123456789"))


def parse_yaml(text: str | bytes) -> Any:
    """What a YAML text says; a byte-order mark says nothing.

    Raises:
        yaml.YAMLError: it is no YAML; `DuplicateKey`: a key stands twice.
    """
    return yaml.load(text, Loader)  # a safe one


def load_yaml(path: Path) -> dict[str, Any]:
    """A YAML mapping.

    Raises:
        ConfigError: the file is missing, no YAML, or no mapping.
    """
    try:
        content = parse_yaml(path.read_text("utf-8"))
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is not valid YAML: {exc}") from exc
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a mapping such as 'engine: torch'")
    return content


def merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """`defaults` with what is `given`; mappings in both are merged."""
    result = dict(defaults)
    for key, value in given.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result
