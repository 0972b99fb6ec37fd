"""Reads config.pbtxt files outside of Triton, as the dict that Triton hands to a backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.json_format import MessageToDict
from tritonclient.grpc import model_config_pb2

from tokenrouter.errors import ConfigError


def read_model_config(model: Path) -> dict[str, Any]:
    """The configuration of one model of a repository.

    Raises:
        ConfigError: config.pbtxt is missing or broken.
    """
    path = model / "config.pbtxt"
    try:
        message = text_format.Parse(path.read_text("utf-8"), model_config_pb2.ModelConfig())
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
    except text_format.ParseError as exc:
        raise ConfigError(f"{path} is not a valid model configuration: {exc}") from exc
    config: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True)
    config.setdefault("name", model.name)
    return config
