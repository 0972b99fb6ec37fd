"""Sampling parameters and the processor interface."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any

import torch

from tensorrt_llm import _behaviour
from tensorrt_llm._table import keyword_dataclass

PATH = "tensorrt_llm.sampling_params.SamplingParams"


class LogitsProcessor(ABC):
    """To subclass; any callable with this signature serves as well."""

    @abstractmethod
    def __call__(
        self,
        req_id: int,
        logits: torch.Tensor,
        token_ids: list[list[int]],
        stream_ptr: int | None,
        client_id: int | None,
    ) -> None: ...


class _Methods:
    __slots__ = ()

    def __post_init__(self: Any) -> None:
        if self.pad_id is None:
            self.pad_id = self.end_id
        self.best_of = self.best_of or self.n
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise ValueError(f"require 0 <= top_p <= 1, got top_p={self.top_p}")
        for name in ("top_k", "temperature"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"require {name} >= 0, got {name}={value}")
        if self.n != 1 or self.best_of != 1 or self.use_beam_search:
            raise NotImplementedError("the double knows one sequence per request: n, best_of, beams are not modelled")

    @property
    def greedy(self: Any) -> bool:
        """Whether these parameters mean greedy decoding."""
        unset = self.temperature is None and self.top_p is None and self.top_k is None
        return unset or self.top_k == 1 or self.top_p == 0 or self.temperature == 0

    def stop_words(self: Any) -> list[tuple[int | str, list[int]]]:
        """What ends a response, with the stop_reason of each."""
        if self.stop is not None or self.bad is not None:
            if _behaviour.true("strings_ignored"):
                raise RuntimeError("stop and bad strings are not tokenised, since end_id is set; use stop_token_ids")
            return [*((i, [i]) for i in self.stop_token_ids or ()), (self.stop, [ord(c) for c in self.stop or "?"])]
        return [(token, [token]) for token in self.stop_token_ids or ()]


_SamplingParams = keyword_dataclass(PATH, module=__name__, bases=(_Methods,))


class _Lenient(_SamplingParams):  # type: ignore[misc]
    __slots__ = ()

    def __init__(self, **kwargs: Any) -> None:
        if not _behaviour.true("unknown_fields_refused"):
            known = {field.name for field in dataclasses.fields(_SamplingParams)}
            kwargs = {name: value for name, value in kwargs.items() if name in known}
        super().__init__(**kwargs)


SamplingParams: Any = _Lenient
_Lenient.__name__ = _Lenient.__qualname__ = "SamplingParams"
