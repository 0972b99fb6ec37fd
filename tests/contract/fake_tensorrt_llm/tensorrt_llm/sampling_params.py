"""Sampling parameters and the processor interface."""

from __future__ import annotations

import dataclasses
import inspect
from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from tensorrt_llm import _behaviour
from tensorrt_llm._table import keyword_dataclass


class LogitsProcessor(ABC):
    """To subclass; any callable with this signature serves as well."""

    @abstractmethod
    def __call__(
        self, req_id: int, logits: Tensor, token_ids: list[list[int]], stream_ptr: int | None, client_id: int | None
    ) -> None: ...


class _Checked:
    __slots__ = ()

    def __post_init__(self: Any) -> None:
        if self.top_k not in (None, 1):
            raise NotImplementedError(f"the double is greedy; top_k={self.top_k} is not modelled")


_SamplingParams = keyword_dataclass("tensorrt_llm.sampling_params.SamplingParams", module=__name__, bases=(_Checked,))


class SamplingParams(_SamplingParams):  # type: ignore[misc]
    __slots__ = ()
    __signature__ = inspect.signature(_SamplingParams)

    def __init__(self, **kwargs: Any) -> None:
        if not _behaviour.true("unknown_fields_refused"):
            known = {field.name for field in dataclasses.fields(_SamplingParams)}
            kwargs = {name: value for name, value in kwargs.items() if name in known}
        super().__init__(**kwargs)
