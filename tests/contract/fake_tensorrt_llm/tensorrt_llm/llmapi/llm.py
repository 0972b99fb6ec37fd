"""The entry point."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from tensorrt_llm import _behaviour
from tensorrt_llm._double.executor import Executor, GenerationRequest
from tensorrt_llm._table import method
from tensorrt_llm.executor.result import GenerationResult
from tensorrt_llm.llmapi.llm_args import TorchLlmArgs
from tensorrt_llm.sampling_params import SamplingParams


class RequestOutput(GenerationResult):
    """The output of one request."""


class LLM:
    """A model with its executor."""

    @method("tensorrt_llm.LLM")
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.args = TorchLlmArgs.for_llm({**arguments.pop("kwargs"), **arguments})
        self._executor: Executor | None = Executor(self.args)

    @method("tensorrt_llm.LLM.generate_async")
    def generate_async(self, call: dict[str, Any]) -> RequestOutput:
        """Submits a request and returns at once."""
        if self._executor is None:
            raise RuntimeError("LLM is shut down")
        prompt = _prompt(call["inputs"])
        params = call["sampling_params"]
        if not isinstance(params, SamplingParams):
            raise TypeError(f"The sampling_params must be type SamplingParams, not {type(params)}")
        if params.end_id is None and _behaviour.true("end_id_needed"):
            raise ValueError("tokenizer is required to initialize a default sampling_params, or set end_id")
        if call["lora_request"] or call["disaggregated_params"]:
            raise NotImplementedError("the double serves no LoRA and no disaggregated requests")
        most = self.args.max_num_tokens
        if len(prompt) > most and not self.args.enable_chunked_prefill and _behaviour.true("prompt_limit"):
            raise ValueError(f"The prompt length ({len(prompt)}) should not exceed max_num_tokens ({most})")
        request = GenerationRequest(
            self._executor.next_id(),
            prompt,
            params,
            params.max_tokens,
            call["streaming"],
            call["kv_cache_retention_config"],
            call["cache_salt"],
        )
        result = RequestOutput(request, self._executor)
        self._executor.submit(request, result)
        while self._executor.unanswered(request.id) and not _behaviour.true("returns_at_once"):
            time.sleep(0.001)
        return result

    @method("tensorrt_llm.LLM.get_stats")
    def get_stats(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """Iterations since the last call, if they are kept."""
        assert self._executor is not None
        return [] if self._executor.iterations is None else self._executor.iterations.results()

    @method("tensorrt_llm.LLM.get_stats_async")
    def get_stats_async(self, call: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The same, to iterate over."""
        assert self._executor is not None
        return _none() if self._executor.iterations is None else self._executor.iterations.of(call["timeout"])

    @method("tensorrt_llm.LLM.shutdown")
    def shutdown(self, call: dict[str, Any]) -> None:
        """Ends the executor."""
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()


async def _none() -> AsyncIterator[dict[str, Any]]:
    """Before the first submission."""
    return
    yield


def _prompt(inputs: Any) -> list[int]:
    tokens = inputs["prompt_token_ids"] if isinstance(inputs, dict) else inputs
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        raise NotImplementedError("the double has no tokenizer: a prompt is a list of token ids")
    return list(tokens)
