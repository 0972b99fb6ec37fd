"""A double of tensorrt_llm: behaves as TensorRT-LLM does in what tokenrouter relies on, on any machine.

It is made of facts, not of TensorRT-LLM's code: names, signatures and behaviours come from
`tokenrouter.engines.tensorrt_llm.facts`, and tokens are computed by `tokenrouter.engines.torch`. What it does not model
it refuses with NotImplementedError.
"""

from tensorrt_llm.llmapi.llm import LLM
from tensorrt_llm.sampling_params import SamplingParams
from tensorrt_llm.version import __version__

__all__ = ["LLM", "SamplingParams", "__version__"]
