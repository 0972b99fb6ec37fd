"""Results and errors of the executor."""

from tensorrt_llm.executor.utils import RequestError

__all__ = ["RequestError"]
