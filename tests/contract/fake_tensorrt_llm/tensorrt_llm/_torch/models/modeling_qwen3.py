"""Qwen3."""

from tensorrt_llm._torch.models.modeling_utils import DecoderModelForCausalLM, register_auto_model


@register_auto_model("Qwen3ForCausalLM")
class Qwen3ForCausalLM(DecoderModelForCausalLM):
    """The stock class for Qwen3."""
