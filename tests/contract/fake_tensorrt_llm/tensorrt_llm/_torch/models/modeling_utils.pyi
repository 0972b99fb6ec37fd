"""Written by tests/contract/stubs.py from tokenrouter.engines.tensorrt_llm.facts."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

_Class = TypeVar("_Class", bound=type)
def register_auto_model(
    name: str,
) -> Callable[[_Class], _Class]: ...

class DecoderModelForCausalLM(nn.Module):
    model: nn.Module
    lm_head: nn.Module
    model_config: Any
    config: Any
