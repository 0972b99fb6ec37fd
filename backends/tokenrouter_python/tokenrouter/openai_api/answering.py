"""Sends an answer, whole or as server-sent events, for as long as somebody is there to take it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel

from tokenrouter.openai_api.completions import Chunk
from tokenrouter.openai_api.errors import ApiError

T = TypeVar("T")


async def answered(
    request: Request,
    whole: Callable[[], Coroutine[Any, Any, BaseModel]],
    chunks: Callable[[], AsyncIterator[list[Chunk]]],
    *,
    stream: bool,
) -> Response:
    if not stream:
        answer = await _unless_gone(request, whole())
        return (
            Response(answer.model_dump_json(), media_type="application/json") if answer else Response(status_code=499)
        )
    events = chunks()
    # Before anything is sent the status can still say what is wrong.
    first = await anext(events)
    return StreamingResponse(_events(first, events), media_type="text/event-stream")


async def _events(first: list[Chunk], rest: AsyncIterator[list[Chunk]]) -> AsyncIterator[bytes]:
    try:
        yield _encoded(first)
        async for chunks in rest:
            yield _encoded(chunks)
    except ApiError as exc:
        yield _encoded([exc.body.model_dump()])
    finally:
        await rest.aclose()  # type: ignore[attr-defined]
    yield b"data: [DONE]\n\n"


def _encoded(events: Sequence[object]) -> bytes:
    return b"".join([b"data: " + msgspec.json.encode(event) + b"\n\n" for event in events])


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; if the client leaves before, the work is cancelled at once and the result is None."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
