"""The paths under `/v1`."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion
from pydantic import BaseModel

from tokenrouter.openai_api.answering import answered
from tokenrouter.openai_api.authorisation import authorised
from tokenrouter.openai_api.chat import ChatAnswer
from tokenrouter.openai_api.completions import Answer
from tokenrouter.openai_api.deployment import Deployment
from tokenrouter.openai_api.errors import ErrorBody, refused
from tokenrouter.openai_api.requests import ChatCompletionRequest, CompletionRequest, GenerationFields
from tokenrouter.openai_api.response_stream import ResponseStream, begin

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody} for status in (400, 401, 404, 413, 422, 429, 500, 503, 504)
}
_COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""


class ModelList(BaseModel):
    """Answer of `GET /v1/models`."""

    object: str = "list"
    data: list[Model]


router = APIRouter(prefix="/v1", responses=_ERRORS, dependencies=[Depends(authorised)])


@router.get("/models")
async def list_models(request: Request) -> ModelList:
    return ModelList(data=[_model(request, name) for name in _deployment(request).model_ids])


@router.get("/models/{model}")
async def get_model(model: str, request: Request) -> Model:
    _deployment(request).target(model)
    return _model(request, model)


@router.post("/completions", response_model=Completion)
async def completions(body: CompletionRequest, request: Request) -> Response:
    body.refuse_unsupported()
    limit = body.max_tokens or _COMPLETION_TOKENS
    prompts = [await _deployment(request).encode(prompt) for prompt in body.prompts]
    log_probs = body.logprobs is not None
    answer = Answer(body, [_begin(request, body, prompt, limit, log_probs=log_probs) for prompt in prompts])
    return await answered(request, answer, stream=bool(body.stream))


@router.post("/chat/completions", response_model=ChatCompletion)
async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
    body.refuse_unsupported()
    deployment = _deployment(request)
    prompt = await deployment.encode_chat(_messages(body))
    room = max(1, deployment.context - len(prompt))
    limit = body.max_completion_tokens or body.max_tokens or min(request.app.state.settings.chat_tokens, room)
    answer = ChatAnswer(body, _begin(request, body, prompt, limit, log_probs=bool(body.logprobs)))
    return await answered(request, answer, stream=bool(body.stream))


def _deployment(request: Request) -> Deployment:
    deployment: Deployment = request.app.state.deployment
    return deployment


def _model(request: Request, name: str) -> Model:
    return Model(id=name, created=request.app.state.started, object="model", owned_by="tokenrouter")


def _begin(
    request: Request, body: GenerationFields, prompt: list[int], max_tokens: int, *, log_probs: bool
) -> ResponseStream:
    return begin(
        body,
        prompt,
        triton=request.app.state.triton,
        deployment=_deployment(request),
        max_tokens=max_tokens,
        log_probs=log_probs,
        headers=request.headers,
    )


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
