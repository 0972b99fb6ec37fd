"""Llama."""

from tensorrt_llm._torch.models.modeling_utils import DecoderModelForCausalLM, register_auto_model


@register_auto_model("LlamaForCausalLM")
class LlamaForCausalLM(DecoderModelForCausalLM):
    """The stock class for Llama."""
