"""Written by tests/contract/stubs.py from tokenrouter.engines.tensorrt_llm.facts."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn
from tensorrt_llm._torch.attention_backend import AttentionMetadata
from tensorrt_llm._torch.models.modeling_utils import DecoderModelForCausalLM

class LlamaForCausalLM(DecoderModelForCausalLM):
    def __init__(
        self,
        model_config: Any,
    ) -> None: ...
    def forward(
        self,
        attn_metadata: AttentionMetadata,
        input_ids: Tensor | None = ...,
        position_ids: Tensor | None = ...,
        inputs_embeds: Tensor | None = ...,
        return_context_logits: bool = ...,
        spec_metadata: Any = ...,
        lora_params: Any = ...,
        **kwargs: Any,
    ) -> Any: ...
