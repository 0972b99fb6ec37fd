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
    InternalError          we contradict ourselves: a bug
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
    """A configuration file of the deployment is wrong."""

    slug = "config"


class InvalidRequest(RouterError):
    """The client sent something that can never be served."""

    slug = "invalid_request"
    code = "INVALID_ARG"


class PromptTooLong(InvalidRequest):
    """Prompt and max_tokens together exceed a limit of a model."""

    slug = "prompt_too_long"


class Overloaded(RouterError):
    """The queue in front of the entry model is full."""

    slug = "overloaded"
    code = "UNAVAILABLE"


class DeadlineExceeded(RouterError):
    """The request was not started, or not finished, before its deadline."""

    slug = "deadline_exceeded"
    code = "UNAVAILABLE"


class ModelUnavailable(RouterError):
    """A subserver is not connected."""

    slug = "model_unavailable"
    code = "UNAVAILABLE"


class PolicyFailed(RouterError):
    """The routing policy raised an exception or returned something unusable."""

    slug = "policy_failed"


class EngineFailed(RouterError):
    """A forward pass raised an exception."""

    slug = "engine_failed"


class RequestCancelled(RouterError):
    """The client cancelled the request or disconnected."""

    slug = "cancelled"
    code = "CANCELLED"


class ProtocolError(RouterError):
    """A peer on the token channel broke the protocol."""

    slug = "protocol"


class InternalError(RouterError):
    """A state machine contradicts itself: a bug of ours, whoever noticed it."""


def assert_never(value: NoReturn) -> NoReturn:
    """Where mypy has to prove that all members of an enum are handled; as in `typing`, but Python 3.10 has none."""
    raise InternalError(f"bug: {value!r} is not handled")
