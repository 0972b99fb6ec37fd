"""What requests and models are told that the orchestrator does not serve."""

from __future__ import annotations

from tokenrouter.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineFailed,
    InvalidRequest,
    ModelUnavailable,
    PolicyFailed,
    RouterError,
)
from tokenrouter.messages import ModelInfo
from tokenrouter.orchestrator.generation import Generation
from tokenrouter.protocol_version import check_version


def too_late(generation: Generation, now_ns: int, limit_ns: int) -> DeadlineExceeded:
    """A request that is at the deployment's limit of time."""
    took_s, tokens = (now_ns - generation.arrived_ns) * 1e-9, len(generation.transcript.tokens)
    return DeadlineExceeded(
        f"the request is over after {took_s:.1f} s and {tokens} tokens: this deployment ends requests after "
        f"{limit_ns * 1e-9:g} s (max_request_seconds); lower max_tokens"
    )


def stopping() -> ModelUnavailable:
    """What is told to requests that a stopping server does not finish."""
    return ModelUnavailable("the server is stopping; send the request again once it is back, or to another server")


def check_greeting(model: str, info: ModelInfo) -> None:
    """Refuses a model of another name or version. Raises ProtocolError or ConfigError."""
    check_version(f"model {model!r}", info.version, info.oldest)
    if info.model != model:
        raise ConfigError(f"expected model {model!r} on the channel, but {info.model!r} answered")


def remote(error: tuple[str, str] | None, model: str) -> RouterError:
    """What a model said of a request."""
    slug, text = error or ("engine_failed", "no reason given")
    known: dict[str, type[RouterError]] = {
        cls.slug: cls for cls in (PolicyFailed, InvalidRequest, ConfigError, EngineFailed)
    }
    return known.get(slug, EngineFailed)(f"model {model!r}: {text}")
