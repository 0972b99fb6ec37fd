"""Refuses bodies over a limit before they are read."""

from __future__ import annotations

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenrouter.openai_api.errors import ApiError


class BodyLimit:
    """ASGI middleware: 413 for a body of more than `max_bytes`, whether or not its length was announced."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            await self._refusal()(scope, receive, send)
            return
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise ApiError(413, self._text(), code="body_too_large")
            return message

        await self._app(scope, counted, send)

    def _text(self) -> str:
        return f"the body has more than {self._max_bytes} bytes; shorten it, or start the server with --max-body-bytes"

    def _refusal(self) -> JSONResponse:
        return JSONResponse(ApiError(413, self._text(), code="body_too_large").body.model_dump(), 413)
