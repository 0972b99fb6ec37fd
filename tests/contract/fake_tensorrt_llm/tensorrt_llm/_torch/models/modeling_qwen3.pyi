"""Written by tests/contract/stubs.py from tokenrouter.engines.tensorrt_llm.facts."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from tensorrt_llm._torch.models.modeling_utils import DecoderModelForCausalLM

class Qwen3ForCausalLM(DecoderModelForCausalLM):
    ...
