"""What a client of `/v1` is told when something is wrong: OpenAI's error object, and which HTTP status goes with it."""

from __future__ import annotations

import grpc
from pydantic import BaseModel

from tokenrouter.entry_queue import EXPIRED, QUEUE_FULL


class ErrorObject(BaseModel):
    """OpenAI's error object; the official client chooses its exception class by the HTTP status."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """Body of every answer that is an error, and of the event that ends a stream which fails."""

    error: ErrorObject


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """Ends a call with an HTTP status and an error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
        self.body = ErrorBody(error=ErrorObject(message=message, type=kind, param=param, code=code))


def refused(param: str, message: str) -> ApiError:
    """A request that is well-formed and asks for something that is not offered."""
    return ApiError(400, message, param=param)


def from_triton(code: grpc.StatusCode, message: str) -> ApiError:
    """The error of a call to Triton.

    Triton has one code, UNAVAILABLE, for a full queue, an expired request, and a model that is away; the queue's own
    words, which are Triton's, tell them apart.
    """
    if QUEUE_FULL in message:
        return ApiError(429, message, code="queue_full")
    if EXPIRED in message or code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return ApiError(504, message, code="timeout")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return ApiError(400, message)
    if code is grpc.StatusCode.NOT_FOUND:
        return ApiError(404, message, param="model", code="model_not_found")
    if code is grpc.StatusCode.UNAVAILABLE:
        return ApiError(503, message, code="unavailable")
    return ApiError(500, message)


def timed_out() -> ApiError:
    """A response that Triton ended because its time was over."""
    return ApiError(504, "the response did not end within the time that this deployment allows", code="timeout")
