"""The release that this double stands for."""

from tokenrouter.engines.tensorrt_llm.facts import VERSION

__version__ = VERSION
