"""The server: the paths of `/v1`, health and metrics, and how errors are answered."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from tokenrouter import __version__
from tokenrouter.metrics_page import connected
from tokenrouter.openai_api import api, playground
from tokenrouter.openai_api.body_limit import BodyLimit
from tokenrouter.openai_api.deployment import Deployment
from tokenrouter.openai_api.errors import ApiError, ErrorBody
from tokenrouter.openai_api.triton import Triton


@dataclass(frozen=True)
class Settings:
    """How the server runs.

    Attributes:
        grpc_url: host:port of Triton's gRPC endpoint.
        metrics_url: URL of Triton's metrics page, or None.
        api_key: what clients must send as bearer token, or None.
        max_body_bytes: largest request body.
        chat_tokens: default of `max_tokens` in a chat, cut to what fits the context.
        playground: whether `/` is the playground.
    """

    grpc_url: str
    metrics_url: str | None = None
    api_key: str | None = None
    max_body_bytes: int = 4 << 20
    chat_tokens: int = 512
    playground: bool = True


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
    app.state.deployment, app.state.settings = deployment, settings
    app.state.started = int(time.time())  # `created` of the models
    app.include_router(operation)
    app.include_router(api.router)
    if settings.playground:
        app.include_router(playground.router)
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


operation = APIRouter()


@operation.get("/health/ready", responses={503: {"model": ErrorBody}}, response_class=PlainTextResponse)
async def ready(request: Request) -> Response:
    state = request.app.state
    served = {state.deployment.entry: (state.deployment.entry,), **state.deployment.config.all_replicas}
    remote = state.deployment.config.hosts
    absent = await state.triton.ready([name for names in served.values() for name in names if name not in remote])
    absent += await _unconnected(state) if remote else []
    missing = [model for model, replicas in served.items() if set(replicas) <= set(absent)]
    if missing:
        raise ApiError(503, f"not ready: {', '.join(missing)}", code="unavailable")
    return PlainTextResponse("ready\n")


async def _metrics_page(url: str) -> httpx.Response:
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=5.0) as client:
            page: httpx.Response = await client.get(url)
    except httpx.HTTPError as exc:
        raise ApiError(503, f"Triton's metrics page does not answer: {exc}", code="unavailable") from exc
    return page


async def _unconnected(state: Any) -> list[str]:
    """Models of other hosts to which the entry model has no connection, by what it publishes."""
    url = state.settings.metrics_url
    found = connected((await _metrics_page(url)).text, state.deployment.entry) if url else {}
    return [name for name in state.deployment.config.hosts if not found.get(name)]


@operation.get(
    "/metrics", responses={404: {"model": ErrorBody}, 503: {"model": ErrorBody}}, response_class=PlainTextResponse
)
async def metrics(request: Request) -> Response:
    url = request.app.state.settings.metrics_url
    if url is None:
        raise ApiError(404, "this server was started without --metrics-url")
    page = await _metrics_page(url)
    return Response(page.content, page.status_code, media_type=page.headers.get("content-type"))
