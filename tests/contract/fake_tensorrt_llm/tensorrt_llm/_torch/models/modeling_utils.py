"""Model classes by the name in a checkpoint's `architectures`, and the base of the stock ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor, nn

from tensorrt_llm import _behaviour

MODEL_CLASS_MAPPING: dict[str, type] = {}
_STOCK: dict[str, type] = {}

_Class = TypeVar("_Class", bound=type)


class ModelConfig:
    """Hands the checkpoint's configuration to a model class. `runner` belongs to the double."""

    def __init__(self, pretrained_config: Any, runner: Any) -> None:
        self.pretrained_config = pretrained_config
        self.runner = runner


def register_auto_model(name: str) -> Callable[[_Class], _Class]:
    """Decorator: this class serves checkpoints whose architectures[0] is `name`."""

    def decorate(cls: _Class) -> _Class:
        if cls.__module__.startswith("tensorrt_llm."):
            _STOCK[name] = cls
        MODEL_CLASS_MAPPING[name] = cls
        return cls

    return decorate


class _Decoder(nn.Module):
    """The layers up to the final norm; called with packed tokens, it gives their hidden states [T, H]."""

    def __init__(self, runner: Any) -> None:
        super().__init__()
        object.__setattr__(self, "_runner", runner)
        self.embed_tokens = runner._model.get_input_embeddings()

    def forward(self, attn_metadata: Any, input_ids: Tensor, **kwargs: Any) -> Tensor:
        assert kwargs.pop("inputs_embeds") is None
        assert kwargs.pop("position_ids").shape == (1, len(input_ids))
        assert kwargs.pop("spec_metadata", None) is None
        hidden: Tensor = self._runner.hidden_states(input_ids)
        return hidden


class DecoderModelForCausalLM(nn.Module):
    """Decoder and LM head."""

    def __init__(self, model_config: ModelConfig) -> None:
        super().__init__()
        self.model_config = model_config
        self.model = _Decoder(model_config.runner)
        self.lm_head = model_config.runner._head

    @property
    def config(self) -> Any:
        """The checkpoint's configuration."""
        return self.model_config.pretrained_config

    def load_weights(self, weights: dict[str, Any]) -> None:
        """Every parameter of the class must be in the checkpoint."""
        for name, _ in self.named_parameters():
            weights[name]

    def forward(
        self,
        attn_metadata: Any,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        return_context_logits: bool = False,
        spec_metadata: Any = None,
        **kwargs: Any,
    ) -> Any:
        hidden = self.model(
            attn_metadata=attn_metadata,
            input_ids=input_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            spec_metadata=spec_metadata,
            **kwargs,
        )
        last = attn_metadata.seq_lens_cuda.cumsum(0).long() - 1
        logits: Tensor = self.lm_head(hidden[last])
        return logits.float()


def build(runner: Any, config: Any) -> Any:
    """The model of a checkpoint.

    Raises:
        ValueError: no class is registered for it.
    """
    from tensorrt_llm._torch.models import modeling_llama, modeling_qwen, modeling_qwen3  # noqa: F401

    name = config.architectures[0]
    known = MODEL_CLASS_MAPPING if _behaviour.true("model_registered") else _STOCK
    if name not in known:
        raise ValueError(f"Unknown architecture for AutoModelForCausalLM: {name}")
    model = known[name](ModelConfig(config, runner))
    model.load_weights(dict.fromkeys(runner._model.state_dict()))
    return model.eval()
