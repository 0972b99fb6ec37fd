"""The entry point."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tensorrt_llm import _behaviour
from tensorrt_llm._double.executor import Executor
from tensorrt_llm._double.requests import GenerationRequest
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
        self.tokenizer = None if self.args.skip_tokenizer_init else _tokenizer(self.args)
        self._executor: Executor | None = Executor(self.args)

    @method("tensorrt_llm.LLM.generate_async")
    def generate_async(self, call: dict[str, Any]) -> RequestOutput:
        """Submits a request and returns at once."""
        if self._executor is None:
            raise RuntimeError("LLM is shut down")
        prompt, text = self._prompt(call["inputs"])
        params = self._prepare(call["sampling_params"])
        if call["lora_request"] or call["disaggregated_params"]:
            raise NotImplementedError("the double serves no LoRA and no disaggregated requests")
        limited = not self.args.enable_chunked_prefill and _behaviour.true("prompt_limit")
        if limited and len(prompt) > self.args.max_num_tokens:
            raise ValueError(
                f"The prompt length ({len(prompt)}) should not exceed max_num_tokens ({self.args.max_num_tokens})"
            )
        request = GenerationRequest(
            self._executor.next_id(),
            prompt,
            params,
            call["streaming"],
            call["kv_cache_retention_config"],
            call["cache_salt"],
        )
        result = RequestOutput(request, self._executor, self.tokenizer)
        result.prompt = text
        self._executor.submit(request, result)
        if not _behaviour.true("returns_at_once"):
            while self._executor.unanswered(request.id):
                time.sleep(0.001)
        return result

    def generate(self, inputs: Any, sampling_params: Any = None, **kwargs: Any) -> Any:
        """Submits one prompt and waits for its end."""
        return self.generate_async(inputs, sampling_params, **kwargs).result()

    @method("tensorrt_llm.LLM.get_stats")
    def get_stats(self, call: dict[str, Any]) -> list[dict[str, Any]]:
        """Blocks and iterations, of the moment."""
        assert self._executor is not None
        return [self._executor.stats(call["timeout"])]

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

    def __reduce__(self) -> Any:
        raise TypeError("LLM cannot be pickled")

    def _prompt(self, inputs: Any) -> tuple[list[int], str | None]:
        if isinstance(inputs, dict) and "prompt_token_ids" in inputs:
            return list(inputs["prompt_token_ids"]), None
        if isinstance(inputs, list) and all(isinstance(token, int) for token in inputs):
            return list(inputs), None
        if isinstance(inputs, dict):
            inputs = inputs.get("prompt")
        if isinstance(inputs, str):
            if self.tokenizer is None:
                raise ValueError("a text prompt needs a tokenizer; skip_tokenizer_init is set")
            return self.tokenizer.encode(inputs), inputs
        raise TypeError(f"The inputs must be type str or list of int, but got {type(inputs)}")

    def _prepare(self, params: Any) -> Any:
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"The sampling_params must be type SamplingParams, not {type(params)}")
        if params.end_id is None:
            if self.tokenizer is None:
                if _behaviour.true("end_id_needed"):
                    raise ValueError("tokenizer is required to initialize a default sampling_params, or set end_id")
            else:
                params.end_id = self.tokenizer.eos_token_id
        params.stop_words()
        return params


def _tokenizer(args: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(Path(args.tokenizer or args.model), local_files_only=True)
