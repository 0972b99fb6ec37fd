"""Streams of chunks are those of the `openai` package's types."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion, CompletionChoice
from openai.types.chat import ChatCompletionChunk
from openai.types.chat.chat_completion_chunk import Choice, ChoiceDelta
from tokenizers import Tokenizer

from tokenrouter.openai_api.chat import ChatAnswer
from tokenrouter.openai_api.completions import Answer
from tokenrouter.openai_api.events import TextEvents
from tokenrouter.openai_api.requests import ChatCompletionRequest, CompletionRequest
from tokenrouter.openai_api.response_stream import ResponseStream
from tokenrouter.openai_api.tokens import Piece, Token
from tools.demo_models.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()
# Everything that a tokenizer can decode to: no lone surrogates, since those are no UTF-8.
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
AWKWARD = [
    '"',
    "\\",
    "\n\r\t\0\x1f\x7f",
    "\u2028\u2029",
    "\ufffd",
    '"text":""',
    '"content":""',
    "🙂é",
    "data: x\n\n",
    "",
]


@dataclass
class Written:
    """What a response stream gives, without Triton."""

    texts: Sequence[Sequence[str]]
    prompt: Sequence[int] = (1, 2)
    finish_reason: str = "stop"
    completion_tokens: int = 7
    totals: dict[str, Any] = field(default_factory=lambda: {"policy": "random"})
    tokenizer: Tokenizer = TOKENIZER

    @property
    def deployment(self) -> Written:
        return self

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        for together in self.texts:
            yield [Piece(text, [Token(5, -0.5, "small")]) for text in together]


def response(*texts: Sequence[str]) -> ResponseStream:
    return cast(ResponseStream, Written(texts))


def contents(answer: Answer | ChatAnswer) -> list[Any]:
    """What the events of an answer say."""

    async def sent() -> bytes:
        return b"".join([events async for events in answer.events()]) + answer.ending()

    events = asyncio.run(sent()).decode().split("\n\n")
    assert events.pop() == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


def completion(answer: Answer, **choice: Any) -> dict[str, Any]:
    made = CompletionChoice.model_construct(index=0, logprobs=None, **choice)
    chunk = Completion(
        id=answer.id, choices=[made], created=answer.created, model="m", object="text_completion", usage=None
    )
    return chunk.model_dump(exclude_unset=True)


def chat_chunk(answer: ChatAnswer, reason: Any = None, **delta: Any) -> dict[str, Any]:
    made = Choice(index=0, delta=ChoiceDelta(**delta), finish_reason=reason, logprobs=None)
    chunk = ChatCompletionChunk(
        id=answer.id, choices=[made], created=answer.created, model="m", object="chat.completion.chunk"
    )
    return chunk.model_dump(exclude_unset=True)


@given(TEXT | st.sampled_from(AWKWARD), TEXT | st.sampled_from(AWKWARD))
def test_an_event_of_a_text_is_json_of_all_of_it(text: str, model: str) -> None:
    chunk = {"id": "x", "choices": [{"index": 0, "text": ""}], "model": model}
    event = TextEvents(chunk, "text").of(text)
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert b"\n" not in event[:-2]  # that would end it
    expected = {"id": "x", "choices": [{"index": 0, "text": text}], "model": model}
    assert json.loads(event[6:]) == expected


@settings(deadline=None)
@given(st.lists(st.lists(TEXT | st.sampled_from(AWKWARD), min_size=1, max_size=3), max_size=3))
def test_completions_are_those_of_the_types(texts: list[list[str]]) -> None:
    answer = Answer(CompletionRequest(model="m", prompt="p", stream=True), [response(*texts)])
    expected = [completion(answer, text=text, finish_reason=None) for together in texts for text in together]
    assert contents(answer) == [*expected, completion(answer, text="", finish_reason="stop")]


@settings(deadline=None)
@given(st.lists(st.lists(TEXT | st.sampled_from(AWKWARD), min_size=1, max_size=3), max_size=3))
def test_chats_are_those_of_the_types(texts: list[list[str]]) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    answer = ChatAnswer(ChatCompletionRequest(model="m", messages=messages, stream=True), response(*texts))
    expected = [chat_chunk(answer, content=text) for together in texts for text in together]
    first = chat_chunk(answer, role="assistant", content="")
    assert contents(answer) == [first, *expected, chat_chunk(answer, "stop")]


def test_extras_usage_and_echo() -> None:
    extras = {"logprobs": 0, "return_routing": True, "echo": True, "stream_options": {"include_usage": True}}
    body: Any = {"model": "m", "prompt": ["p", "q"], "stream": True, **extras}
    answer = Answer(CompletionRequest(**body), [response(["a", "b"]), response(["c"])])
    *chunks, usage = contents(answer)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["index"] for choice in choices] == [0, 0, 0, 0, 1, 1, 1]
    echo = choices[0]["text"]
    assert [choice["text"] for choice in choices] == [echo, "a", "b", "", echo, "c", ""]
    assert choices[2]["logprobs"]["text_offset"] == [len(echo) + 1]
    assert choices[2]["routing"] == {"writers": ["small"], "token_ids": [5]}
    assert choices[3]["routing"] == {"writers": [], "token_ids": [], "policy": "random"}
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 18)
    for chunk in (chunks[3], chunks[6], usage):  # the package's own type has no None for a reason
        Completion.model_validate(chunk)
