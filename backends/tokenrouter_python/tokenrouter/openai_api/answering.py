"""Sends an answer, whole or as server-sent events, for as long as somebody is there to take it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from tokenrouter.openai_api.errors import ApiError
from tokenrouter.openai_api.events import DONE, event

T = TypeVar("T")
_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}


class Answer(Protocol):
    """An answer to one request."""

    def whole(self) -> Coroutine[Any, Any, BaseModel]:
        """All of it, when it is there."""
        ...

    def events(self) -> AsyncGenerator[bytes, None]:
        """It as it comes: those events together that came together."""
        ...

    def ending(self) -> bytes:
        """The events behind all of these."""
        ...


async def answered(request: Request, answer: Answer, *, stream: bool) -> Response:
    """The answer as a response; what goes wrong with a stream before its first event is raised when it is sent."""
    if stream:
        return EventStream(answer)
    whole = await _unless_gone(request.receive, answer.whole())
    return Response(whole.model_dump_json(), media_type="application/json") if whole else Response(status_code=499)


class EventStream(Response):
    """A stream of events; the client that leaves cancels it at once.

    Sends by itself: the layers of `StreamingResponse` cost more for every token than what is in it.
    """

    def __init__(self, answer: Answer) -> None:
        super().__init__(media_type="text/event-stream")
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it.

        Raises:
            ApiError: there is no first event, and nothing was sent: the status can still say why.
        """
        await _unless_gone(receive, self._send(send))

    async def _send(self, send: Send) -> None:
        events = self._answer.events()
        try:
            data = await anext(events, b"")
            await send(_START)
            try:
                while data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    data = await anext(events, b"")
                data = self._answer.ending()
            except ApiError as exc:
                data = event(exc.body.model_dump())
        finally:
            await events.aclose()
        await send({"type": "http.response.body", "body": data + DONE})


async def _unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; if the client leaves before, the work is cancelled at once and the result is None."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
