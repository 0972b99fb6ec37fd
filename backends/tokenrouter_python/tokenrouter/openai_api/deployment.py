"""What `/v1` needs of a model repository: names of models and policies, tokenizer, chat template, context."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer

from tokenrouter.checkpoint import load_tokenizer
from tokenrouter.config.subserver import SubserverConfig
from tokenrouter.errors import ConfigError, InvalidRequest
from tokenrouter.openai_api.errors import ApiError, refused
from tokenrouter.repository import Repository
from tokenrouter.request import RequestFields
from tokenrouter.tokenization import encode_prompt

_SMALL = 4096  # characters, read in a fraction of the time that a thread takes to begin


@dataclass(frozen=True)
class Target:
    """Where a request goes: Triton's name of the model, and the policy that its `model` names."""

    model: str
    policy: str | None = None


class Deployment:
    """One entry model of a repository.

    Args:
        repository: folder of the model repository.
        entry: name of the entry model, if there are several.
        chat_template: text of a Jinja template instead of the tokenizer's own, or None.

    Raises:
        ConfigError: the repository cannot be read.
    """

    def __init__(self, repository: Path, entry: str | None = None, chat_template: str | None = None) -> None:
        parts = Repository(repository)
        self.config = parts.entry(entry)
        self.entry = self.config.name
        models = list(parts.models(self.config).values())
        self.tokenizer: Tokenizer = load_tokenizer(models[0].checkpoint)
        self.context = min(_context(model) for model in models)
        self._template = ChatTemplate(models[0].checkpoint, chat_template)

    @cached_property
    def model_ids(self) -> list[str]:
        """Everything that `model` may name: the entry, each policy of it, each LLM."""
        policies = sorted(self.config.selectable | {self.config.policy.name})
        return [self.entry, *(f"{self.entry}:{policy}" for policy in policies), *self.config.models]

    @property
    def has_chat_template(self) -> bool:
        return self._template.exists

    def target(self, model: str) -> Target:
        """Where requests for this `model` go.

        Raises:
            ApiError: 404.
        """
        if model not in self.model_ids:
            known = ", ".join([self.entry, *self.config.models])
            message = f"model {model!r} is not served here; there is {known}, and {self.entry}:POLICY (GET /v1/models)"
            raise ApiError(404, message, param="model", code="model_not_found")
        name, _, policy = model.partition(":")
        return Target(name, policy or None)

    async def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt.

        Raises:
            ApiError: 400, it is longer than the deployment takes.
        """
        if not isinstance(prompt, str):
            return list(prompt)
        self._check("prompt", prompt)
        return await _beside(len(prompt), partial(encode_prompt, self.tokenizer, prompt))

    async def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of a chat; the template writes special tokens itself, so none are added.

        Raises:
            ApiError: 400, they are longer than the deployment takes, the template refuses them, or there is none.
        """
        text = "".join(str(message.get("content", "")) for message in messages)
        self._check("messages", text)
        return await _beside(len(text), partial(self._encode_chat, messages))

    def _encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        text = self._template.render(messages)
        return list(self.tokenizer.encode_batch([text], add_special_tokens=False)[0].ids)

    def _check(self, param: str, text: str) -> None:
        """Refuses by the limit that the entry model has for its own prompts."""
        try:
            self.config.limits.check(RequestFields(text_input=text))
        except InvalidRequest as exc:
            raise refused(param, str(exc).replace("text_input", param, 1)) from exc


class ChatTemplate:
    """The chat template of a checkpoint's tokenizer, by transformers' `apply_chat_template`.

    Args:
        folder: the checkpoint.
        text: a template instead of the tokenizer's own.
    """

    def __init__(self, folder: Path, text: str | None) -> None:
        from transformers import PreTrainedTokenizerFast

        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
        if text is not None:
            self._tokenizer.chat_template = text

    @property
    def exists(self) -> bool:
        return self._tokenizer.chat_template is not None

    def render(self, messages: list[dict[str, Any]]) -> str:
        """The prompt's text, with the beginning of the assistant's answer.

        Raises:
            ApiError: 400.
        """
        if not self.exists:
            raise refused(
                "messages",
                "the tokenizer of this deployment has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE",
            )
        try:
            return str(self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except (TemplateError, TypeError, ValueError) as exc:
            raise refused("messages", f"the chat template refuses these messages: {exc}") from exc


async def _beside(size: int, work: Callable[[], list[int]]) -> list[int]:
    """Long texts are read on a thread: whoever is served meanwhile shall not wait."""
    return work() if size <= _SMALL else await asyncio.to_thread(work)


def _context(model: SubserverConfig) -> int:
    """Most tokens of prompt and response: what the deployment says, or what the checkpoint can."""
    limit = model.engine_options.get("max_seq_len")
    if limit is None:
        path = model.checkpoint / "config.json"
        try:
            config = json.loads(path.read_text("utf-8"))
            limit = config.get("max_position_embeddings") or config["n_positions"]
        except (OSError, ValueError, KeyError) as exc:
            raise ConfigError(f"{path} does not say how long a sequence may be: {exc}") from exc
    return int(limit)
