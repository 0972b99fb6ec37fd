"""Errors of the executor."""


class RequestError(RuntimeError):
    """One request failed."""
