"""Bodies of `/v1/completions` and `/v1/chat/completions`, and what of them is refused.

Ranges are those of OpenAI's description; a value out of range is answered 422, as FastAPI does. Fields that ask for
something that is not offered are refused with 400 by `refuse_unsupported`; unknown fields are ignored. `min_tokens`
and `ignore_eos` are vLLM's and NVIDIA's; `policy`, `policy_params`, `speculation`, `return_routing` and
`explain` are ours.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from tokenrouter.openai_api.errors import refused

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Stop = Annotated[list[str], Field(max_length=16)]


class StreamOptions(BaseModel):
    """How a stream is to be sent."""

    include_usage: bool = False


class GenerationFields(BaseModel):
    """What both kinds of request share."""

    model_config = ConfigDict(extra="ignore")

    model: str
    max_tokens: Annotated[int | None, Field(ge=1, le=2**31 - 1)] = None
    temperature: Annotated[float | None, Field(ge=0, le=2, allow_inf_nan=False)] = None
    top_p: Annotated[float | None, Field(ge=0, le=1, allow_inf_nan=False)] = None
    n: Annotated[int | None, Field(ge=1, le=128)] = None
    seed: Annotated[int | None, Field(ge=-(2**63), le=2**63 - 1)] = None
    stop: str | Stop | None = None
    presence_penalty: Annotated[float | None, Field(ge=-2, le=2, allow_inf_nan=False)] = None
    frequency_penalty: Annotated[float | None, Field(ge=-2, le=2, allow_inf_nan=False)] = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    min_tokens: Annotated[int | None, Field(ge=0, le=2**31 - 1)] = None
    ignore_eos: bool | None = None
    policy: str | None = None
    policy_params: dict[str, Any] | None = None
    speculation: bool | None = None
    return_routing: bool = False
    explain: bool = False

    @property
    def stop_words(self) -> list[str]:
        words = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [word for word in words if word]

    @property
    def routed(self) -> bool:
        """Whether choices have `routing`."""
        return self.return_routing or self.explain

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def refuse_unsupported(self) -> None:
        """Refuses what is not offered, by name.

        Raises:
            ApiError: 400.
        """
        if self.n not in (None, 1):
            raise refused("n", f"n is {self.n}; only single choices are offered: leave n out")
        if self.logit_bias:
            raise refused("logit_bias", "logit_bias is not offered; leave it out")
        if self.stream_options is not None and not self.stream:
            raise refused(
                "stream_options", "`stream_options` can only be used when `stream` is True: set it, or leave this out"
            )


class CompletionRequest(GenerationFields):
    """Body of `POST /v1/completions`."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    best_of: Annotated[int | None, Field(ge=1, le=20)] = None
    echo: bool | None = None
    logprobs: Annotated[int | None, Field(ge=0, le=5)] = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Every prompt, as text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [prompt for prompt in self.prompt if isinstance(prompt, str | list)]

    def refuse_unsupported(self) -> None:
        """See `GenerationFields.refuse_unsupported`."""
        super().refuse_unsupported()
        if self.best_of not in (None, 1):
            raise refused("best_of", f"best_of is {self.best_of}; only single choices are offered: leave it out")
        if self.suffix:
            raise refused("suffix", "suffix is not offered; leave it out")
        if (self.logprobs or 0) > 1:
            raise refused(
                "logprobs", f"logprobs is {self.logprobs}; only those of the sampled tokens are offered: 0 or 1"
            )
        if not self.prompts or not all(self.prompts):
            raise refused("prompt", "prompt is empty; send a text, token ids, or a list of them")
        if len(self.prompts) > MAX_PROMPTS:
            raise refused(
                "prompt", f"prompt has {len(self.prompts)} prompts; at most {MAX_PROMPTS} go into one request"
            )


MAX_PROMPTS = 128
"""Most prompts of one request; each runs as a request of its own."""


class TextPart(BaseModel):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(BaseModel):
    """One message of a chat; fields beyond these go to the chat template as they are."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[TextPart] | None = None


class ChatCompletionRequest(GenerationFields):
    """Body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int | None, Field(ge=1, le=2**31 - 1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=20)] = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    def refuse_unsupported(self) -> None:
        """See `GenerationFields.refuse_unsupported`."""
        super().refuse_unsupported()
        for name in ("tools", "functions"):
            if getattr(self, name):
                raise refused(name, f"{name} needs guided decoding, which is not offered; leave it out")
        if (self.response_format or {}).get("type", "text") != "text":
            raise refused(
                "response_format", "response_format other than text needs guided decoding, which is not offered"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise refused(
                "top_logprobs", "`top_logprobs` can only be used when `logprobs` is True: set it, or leave this out"
            )
        if self.top_logprobs:
            raise refused(
                "top_logprobs", "only the log-probability of the sampled token is offered; leave top_logprobs out"
            )
