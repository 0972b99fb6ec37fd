"""Qwen2."""

from tensorrt_llm._torch.models.modeling_utils import DecoderModelForCausalLM, register_auto_model


@register_auto_model("Qwen2ForCausalLM")
class Qwen2ForCausalLM(DecoderModelForCausalLM):
    """The stock class for Qwen2."""
