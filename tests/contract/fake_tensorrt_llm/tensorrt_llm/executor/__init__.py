"""Results and errors of the executor."""

from tensorrt_llm.executor.result import CompletionOutput, GenerationResult, Logprob
from tensorrt_llm.executor.utils import RequestError

__all__ = ["CompletionOutput", "GenerationResult", "Logprob", "RequestError"]
