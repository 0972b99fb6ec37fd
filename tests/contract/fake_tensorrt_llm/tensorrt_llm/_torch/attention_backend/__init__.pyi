"""Written by tests/contract/stubs.py from tokenrouter.engines.tensorrt_llm.facts."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

class AttentionMetadata:
    seq_lens_cuda: Tensor
    seq_lens: Tensor
    num_contexts: int
    request_ids: list[int]
