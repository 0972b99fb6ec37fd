"""The `parameters` of a config.pbtxt, and the rows of those that both roles have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from tokenrouter.channel.tls import TlsSettings
from tokenrouter.config.values import boolean, json_as, mebibytes, microseconds, natural, positive, rejects, seconds
from tokenrouter.errors import ConfigError

T = TypeVar("T")
Row = tuple[str, Callable[[str], Any], str]
# Triton tells no model that a non-streamed HTTP client went away; its request holds KV no longer than this.
MAX_REQUEST_SECONDS = 3600


class Parameters:
    """The `parameters` of a config.pbtxt; every key is taken once, what is left over is unknown."""

    def __init__(self, model: str, raw: Mapping[str, Any]) -> None:
        self._model = model
        self._raw = {key: str(value.get("string_value", "")) for key, value in raw.items()}
        self._known: list[str] = []

    def take(self, key: str, parse: Callable[[str], T], default: T, form: str) -> T:
        """The parsed value of a parameter, or the default if it is absent."""
        self._known.append(key)
        text = self._raw.pop(key, None)
        if text is None:
            return default
        try:
            return parse(text)
        except (ValueError, TypeError, KeyError) as exc:
            raise ConfigError(f"model {self._model!r}: parameter {key} is {text!r}; it is {form}") from exc

    def fields(self, rows: Mapping[str, Row]) -> dict[str, Any]:
        """The fields of a configuration whose parameters are there; for the others its own defaults hold."""
        absent: Any = object()
        values = {name: self.take(key, parse, absent, form) for name, (key, parse, form) in rows.items()}
        return {name: value for name, value in values.items() if value is not absent}

    def done(self) -> None:
        if self._raw:
            raise ConfigError(
                f"model {self._model!r}: unknown parameter {sorted(self._raw)[0]!r} in config.pbtxt; "
                f"known: {', '.join(sorted(self._known))}"
            )


def check_no_native_queue(name: str, batching: Mapping[str, Any]) -> None:
    if batching.get("default_queue_policy") or batching.get("priority_levels"):
        raise ConfigError(
            f"model {name!r}: dynamic_batching has a queue policy or priorities, which this backend does not use; set "
            "max_queue_size, default_timeout_microseconds, timeout_action, allow_timeout_override (and in the entry "
            "model priority_levels, default_priority_level, priority_queue_policy) as parameters instead"
        )


# Field of the configuration -> parameter of config.pbtxt, its parser, and what it is.
QUEUE: dict[str, Row] = {
    "max_queue_size": ("max_queue_size", natural, "a whole number of at least 0"),
    "default_timeout_ns": ("default_timeout_microseconds", microseconds, "a whole number of at least 0"),
    "reject": ("timeout_action", rejects, "REJECT or DELAY"),
    "allow_timeout_override": ("allow_timeout_override", boolean, "true or false"),
}
MAX_INFLIGHT: Row = ("max_inflight", positive, "a whole number of at least 1")
MAX_REQUEST: Row = ("max_request_seconds", seconds, "seconds, at least 0; 0 = no limit")
TLS: Row = (
    "tls",
    json_as(TlsSettings),
    'a JSON object such as {"folder": "/etc/tokenrouter/tls", "peers": ["entry.example"]}',
)
POLICY_CACHE: Row = ("policy_cache_mib", mebibytes, "MiB, at least 1")
