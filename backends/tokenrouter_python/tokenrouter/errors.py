"""One error family: a stable slug for metrics, one Triton code, and a message that names the remedy.

RouterError
    ConfigError            a file of the deployment is wrong; the model does not load
    InvalidRequest         the client sent something that can never be served
        PromptTooLong      prompt and max_tokens exceed the context or the KV pool of a model
    Overloaded             the queue is full
    DeadlineExceeded       the request waited longer than its queue policy or its own timeout allows
    ModelUnavailable       a subserver is not connected, or went away and did not come back in time
    PolicyFailed           the routing policy raised, or routed to nowhere
    EngineFailed           a forward pass raised
    RequestCancelled       the client went away
    ProtocolError          a peer on the token channel broke the protocol
    InternalError          a state machine contradicts itself: a bug of ours
"""

from __future__ import annotations

from typing import NoReturn


class RouterError(Exception):
    """Base of everything a client or an operator can be told.

    Attributes:
        slug: stable name used as metric label and log field; never reworded.
        code: name of the `pb_utils.TritonError` code it is reported with.
    """

    slug = "internal"
    code = "INTERNAL"


class ConfigError(RouterError):
    slug = "config"


class InvalidRequest(RouterError):
    slug = "invalid_request"
    code = "INVALID_ARG"


class PromptTooLong(InvalidRequest):
    slug = "prompt_too_long"


class Overloaded(RouterError):
    slug = "overloaded"
    code = "UNAVAILABLE"


class DeadlineExceeded(RouterError):
    slug = "deadline_exceeded"
    code = "UNAVAILABLE"


class ModelUnavailable(RouterError):
    slug = "model_unavailable"
    code = "UNAVAILABLE"


class PolicyFailed(RouterError):
    slug = "policy_failed"


class EngineFailed(RouterError):
    slug = "engine_failed"


class RequestCancelled(RouterError):
    slug = "cancelled"
    code = "CANCELLED"


class ProtocolError(RouterError):
    slug = "protocol"


class InternalError(RouterError):
    slug = "internal"


def slugs(error: type[RouterError] = RouterError) -> set[str]:
    """Of an error and all of its kinds."""
    return {error.slug}.union(*map(slugs, error.__subclasses__()))


def contained(exc: BaseException) -> Exception:
    """What was raised, as an Exception; a policy's SystemExit and a panic of a library in Rust are none by themselves.

    Raises:
        KeyboardInterrupt: if that is what it was.
    """
    if isinstance(exc, KeyboardInterrupt):
        raise exc
    return exc if isinstance(exc, Exception) else InternalError(f"{type(exc).__name__}: {exc}")


def assert_never(value: NoReturn) -> NoReturn:
    """Where mypy has to prove that all members of an enum are handled; as in `typing`, but Python 3.10 has none."""
    raise InternalError(f"bug: {value!r} is not handled")
