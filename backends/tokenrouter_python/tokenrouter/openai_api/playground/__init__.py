"""The playground: one page that shows who writes each token of a response, while it is written.

Everything comes from this server (no build step, no other host), and the page's content policy lets the browser load
and run nothing else. What a prompt or a model wrote is only ever set as text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, Response
from pydantic import BaseModel

from tokenrouter.errors import RouterError
from tokenrouter.openai_api.authorisation import authorised
from tokenrouter.openai_api.deployment import Deployment
from tokenrouter.openai_api.errors import ApiError, ErrorBody
from tokenrouter.policies import policy_class
from tokenrouter.timeline import chrome
from tokenrouter.timeline.client import record
from tokenrouter.timeline.recording import MOST_MS

_PAGE = Path(__file__).parent / "page"
_TYPES = {".html": "text/html; charset=utf-8", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_FILES = {path.name: path for path in _PAGE.iterdir() if path.suffix in _TYPES}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}


class PolicyKnobs(BaseModel):
    """A policy that a request may name.

    Attributes:
        name: as in `policy`.
        parameters: JSON schema of each of its `policy_params`, default included.
        values: those that the deployment sets; a request's own `policy_params` replace them all.
    """

    name: str
    parameters: dict[str, Any]
    values: dict[str, Any]


class PlaygroundDeployment(BaseModel):
    """What the page can choose from.

    Attributes:
        entry: `model` of routed requests.
        models: the LLMs, small first.
        policy: the deployment's policy.
        policies: all that a request may name.
        chat: whether there is a chat template.
        context: most tokens of prompt and response.
    """

    entry: str
    models: list[str]
    policy: str
    policies: list[PolicyKnobs]
    chat: bool
    context: int


router = APIRouter(include_in_schema=False)


@router.get("/")
async def page() -> Response:
    return _file("index.html")


@router.get("/playground/deployment", dependencies=[Depends(authorised)], responses={401: {"model": ErrorBody}})
async def deployment(request: Request) -> PlaygroundDeployment:
    return describe(request.app.state.deployment)


@router.get("/playground/timeline", dependencies=[Depends(authorised)])
async def timeline(request: Request, seconds: Annotated[float, Query(gt=0, le=MOST_MS / 1000)] = 5.0) -> Response:
    """Records what the server does, and gives the file that ui.perfetto.dev opens."""
    grpc_url, entry = request.app.state.settings.grpc_url, request.app.state.deployment.entry
    try:
        text = await run_in_threadpool(lambda: chrome.text(record(grpc_url, seconds, entry=entry)))
    except RouterError as exc:
        raise ApiError(503, str(exc), code="unavailable") from exc
    headers = {"Content-Disposition": 'attachment; filename="trace.json"'}
    return Response(text, media_type="application/json", headers=headers)


@router.get("/playground/{name}")
async def file(name: str) -> Response:
    return _file(name)


def _file(name: str) -> Response:
    path = _FILES.get(name)
    if path is None:
        raise ApiError(404, f"the playground has no file {name!r}")
    return FileResponse(path, headers=_HEADERS, media_type=_TYPES[path.suffix])


def describe(served: Deployment) -> PlaygroundDeployment:
    """The deployment as the page shows it."""
    config = served.config
    names = sorted(config.selectable | {config.policy.name})
    values = {config.policy.name: msgspec.json.decode(config.policy.params)}
    return PlaygroundDeployment(
        entry=served.entry,
        models=list(config.models),
        policy=config.policy.name,
        policies=[PolicyKnobs(name=name, parameters=_schema(name), values=values.get(name, {})) for name in names],
        chat=served.has_chat_template,
        context=served.context,
    )


def _schema(name: str) -> dict[str, Any]:
    """Schemas of a policy's parameters; a policy that this process cannot import is offered without knobs."""
    try:
        params = policy_class(name).Params
        _, components = msgspec.json.schema_components([params])
    except (RouterError, TypeError):
        return {}
    properties: dict[str, Any] = components[params.__name__].get("properties", {})
    return properties
