"""The server's paths."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2 as httpx
import msgspec
from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from tokenrouter import __version__
from tokenrouter.openai_api.body_limit import BodyLimit
from tokenrouter.openai_api.chat import ChatAnswer
from tokenrouter.openai_api.completions import Answer, Chunk
from tokenrouter.openai_api.deployment import Deployment
from tokenrouter.openai_api.errors import ApiError, ErrorBody, refused
from tokenrouter.openai_api.generation import begin
from tokenrouter.openai_api.requests import ChatCompletionRequest, CompletionRequest
from tokenrouter.openai_api.triton import Triton

log = logging.getLogger(__name__)

T = TypeVar("T")

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 413, 422, 429, 500, 503, 504)
}
_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""


@dataclass(frozen=True)
class Settings:
    """How the server runs.

    Attributes:
        grpc_url: host:port of Triton's gRPC endpoint.
        metrics_url: URL of Triton's metrics page, or None.
        api_key: what clients must send as bearer token, or None.
        max_body_bytes: largest request body.
        chat_tokens: default of `max_tokens` in a chat, cut to what fits the context.
    """

    grpc_url: str
    metrics_url: str | None = None
    api_key: str | None = None
    max_body_bytes: int = 4 << 20
    chat_tokens: int = 512


class ModelList(BaseModel):
    """Answer of `GET /v1/models`."""

    object: str = "list"
    data: list[Model]


def create_app(deployment: Deployment, settings: Settings) -> FastAPI:
    """The server as an ASGI application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.triton = Triton(settings.grpc_url)  # grpc.aio wants the running loop
        yield
        await app.state.triton.close()

    app = FastAPI(title="TokenRouter", version=__version__, lifespan=lifespan)
    app.add_middleware(BodyLimit, max_bytes=settings.max_body_bytes)
    _add_error_handlers(app)
    _add_operation(app, deployment, settings)
    _add_api(app, deployment, settings)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, exc: ApiError) -> Response:
        return JSONResponse(exc.body.model_dump(), exc.status)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, exc: RequestValidationError) -> Response:
        first = exc.errors()[0]
        param = ".".join(str(part) for part in first["loc"] if part != "body") or None
        error = ApiError(422, f"{param or 'the body'}: {first['msg']}", param=param)
        return JSONResponse(error.body.model_dump(), 422)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, exc: HTTPException) -> Response:
        return JSONResponse(ApiError(exc.status_code, str(exc.detail)).body.model_dump(), exc.status_code, exc.headers)

    @app.exception_handler(Exception)
    async def internal(_: Request, exc: Exception) -> Response:
        return JSONResponse(ApiError(500, "internal error; see the server's log").body.model_dump(), 500)


def _add_operation(app: FastAPI, deployment: Deployment, settings: Settings) -> None:
    @app.get("/health/ready", responses={503: {"model": ErrorBody}}, response_class=PlainTextResponse)
    async def ready(request: Request) -> Response:
        missing = await request.app.state.triton.ready([deployment.entry, *deployment.config.models])
        if missing:
            raise ApiError(503, f"not ready: {', '.join(missing)}", code="unavailable")
        return PlainTextResponse("ready\n")

    @app.get(
        "/metrics", responses={404: {"model": ErrorBody}, 503: {"model": ErrorBody}}, response_class=PlainTextResponse
    )
    async def metrics() -> Response:
        if settings.metrics_url is None:
            raise ApiError(404, "this server was started without --metrics-url")
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
                page = await client.get(settings.metrics_url)
        except httpx.HTTPError as exc:
            raise ApiError(503, f"Triton's metrics page does not answer: {exc}", code="unavailable") from exc
        return Response(page.content, page.status_code, media_type=page.headers.get("content-type"))


def _add_api(app: FastAPI, deployment: Deployment, settings: Settings) -> None:
    async def authorised(request: Request) -> None:
        if settings.api_key is None:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode(), settings.api_key.encode()):
            raise ApiError(
                401, "the API key is missing or wrong; send Authorization: Bearer KEY", code="invalid_api_key"
            )

    created = 0
    models = {
        name: Model(id=name, created=created, object="model", owned_by="tokenrouter") for name in deployment.model_ids
    }
    guard = [Depends(authorised)]

    @app.get("/v1/models", responses=_ERRORS, dependencies=guard)
    async def list_models() -> ModelList:
        return ModelList(data=list(models.values()))

    @app.get("/v1/models/{model}", responses=_ERRORS, dependencies=guard)
    async def get_model(model: str) -> Model:
        deployment.target(model)
        return models[model]

    @app.post("/v1/completions", responses=_ERRORS, dependencies=guard, response_model=Completion)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        body.refuse_unsupported()
        limit = body.max_tokens or _COMPLETION_TOKENS
        prompts = [deployment.encode(prompt) for prompt in body.prompts]
        answer = Answer(
            body,
            [
                begin(
                    body,
                    prompt,
                    triton=request.app.state.triton,
                    deployment=deployment,
                    max_tokens=limit,
                    log_probs=body.logprobs is not None,
                )
                for prompt in prompts
            ],
        )
        return await _answered(request, answer.whole, answer.chunks, stream=bool(body.stream))

    @app.post("/v1/chat/completions", responses=_ERRORS, dependencies=guard, response_model=ChatCompletion)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        body.refuse_unsupported()
        prompt = deployment.encode_chat(_messages(body))
        room = max(1, deployment.context - len(prompt))
        generation = begin(
            body,
            prompt,
            triton=request.app.state.triton,
            deployment=deployment,
            max_tokens=body.max_completion_tokens or body.max_tokens or min(settings.chat_tokens, room),
            log_probs=bool(body.logprobs),
        )
        answer = ChatAnswer(body, generation)
        return await _answered(request, answer.whole, answer.chunks, stream=bool(body.stream))


def _messages(body: ChatCompletionRequest) -> list[dict[str, Any]]:
    """Messages as a chat template takes them: content is one text."""
    messages = []
    for index, message in enumerate(body.messages):
        content = message.content
        if isinstance(content, list):
            for part in content:
                if part.type != "text" or part.text is None:
                    raise refused(f"messages.{index}.content", f"a part of type {part.type!r}; only text is offered")
            content = "".join(part.text or "" for part in content)
        messages.append({**message.model_dump(exclude_none=True), "content": content or ""})
    return messages


async def _answered(
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
