"""Triton's model repository API, which a server of `TritonServer` opens to whoever knows its key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request

from tokenrouter.direct_http import http_open

HEADER = "tokenrouter-admin"
"""Name of the HTTP header and, behind `triton-grpc-protocol-`, of the gRPC metadata that carry the key."""
RESTRICTED = "model-repository,shared-memory,trace,logging"
"""APIs that only the key opens. Triton 2.51 splits at `:` here, whatever its help text says."""


class ApiError(OSError):
    """The server refused a call; the text is its own."""


class RepositoryApi:
    """Loads and unloads models of a running server.

    Args:
        http_url: of the server.
        key: of this server.
    """

    def __init__(self, http_url: str, key: str) -> None:
        self._url = f"{http_url}/v2/repository"
        self._headers = {HEADER: key, "Content-Type": "application/json"}

    def states(self, *, timeout_s: float) -> Mapping[str, str]:
        """State (`READY`, `UNLOADING`, ...) of every model that Triton knows.

        Raises:
            OSError: the server does not answer, or refuses.
        """
        return {model["name"]: model.get("state", "") for model in self._post("index", timeout_s)}

    def unload(self, model: str, *, timeout_s: float = 30.0) -> None:
        """Triton answers at once and ends the model's process later.

        Raises:
            OSError: as in `states`.
        """
        self._post(f"models/{model}/unload", timeout_s)

    def load(self, model: str, *, timeout_s: float) -> None:
        """Returns when it is loaded; does nothing for one that Triton believes to be.

        Raises:
            OSError: as in `states`; the text says why the model does not load.
        """
        self._post(f"models/{model}/load", timeout_s)

    def _post(self, path: str, timeout_s: float) -> Any:
        try:
            with http_open(Request(f"{self._url}/{path}", b"{}", self._headers), timeout=timeout_s) as response:
                return json.loads(response.read() or b"null")
        except HTTPError as exc:
            with exc:
                raise ApiError(exc.read().decode("utf-8", "replace").strip()) from exc
