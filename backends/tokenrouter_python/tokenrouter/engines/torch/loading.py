"""Loads a causal LM from a local folder and decides whether the torch engine can serve it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tokenrouter.checkpoint import read_json
from tokenrouter.engines.torch import attention
from tokenrouter.engines.torch.complete import check_complete, refuse_incomplete
from tokenrouter.errors import ConfigError

PROBE_TOKENS = 8
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine needs to know about a model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int | None
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Probe:
    """What the model computes with its own attention.

    Attributes:
        tokens: n token ids.
        logits: [n, V] float32.
        tolerance: largest difference of logits, relative to the largest logit, that rounding explains.
    """

    tokens: list[int]
    logits: Tensor
    tolerance: float


def read_config(path: Path) -> Any:
    """The configuration of a model, as transformers reads it. Local files only.

    Raises:
        ConfigError: not a checkpoint folder.
    """
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} has no config.json; name a folder with a model in Hugging Face format")
    content = read_json(path / "config.json")
    # Read by huggingface_hub when it is first imported; local_files_only below covers the case that it already was.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # Likewise. It warns of what is refused here by name, and of what concerns nobody who serves a model.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    _refuse_unknown(path / "config.json", content)
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as exc:
        raise ConfigError(
            f"{path / 'config.json'}: transformers makes no model of it ({_one_line(exc)}); correct it, or download it "
            "again"
        ) from exc


def _refuse_unknown(path: Path, content: dict[str, Any]) -> None:
    """Raises ConfigError for a model type that transformers does not have."""
    from transformers import CONFIG_MAPPING, __version__

    model_type = content.get("model_type")
    if model_type in CONFIG_MAPPING:
        return
    own = (
        " without the code that comes with the checkpoint (auto_map), which is never run"
        if "auto_map" in content
        else ""
    )
    raise ConfigError(
        f"{path}: model_type is {model_type!r}, which transformers {__version__} does not know{own}; take a model that "
        "it knows, or a release that knows the model"
    )


def _one_line(exc: Exception) -> str:
    return " ".join(str(exc).split())[:300] or type(exc).__name__


def position_limit(config: Any) -> int | None:
    """`max_position_embeddings`; None if the model states none."""
    limit: int | None = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit


def load_model(path: Path, config: Any = None, *, dtype: torch.dtype | Literal["auto"], device: torch.device) -> Any:
    """Loads a model for inference, with its default attention. Reads local files only.

    Args:
        path: folder in Hugging Face format.
        config: what `read_config` says of it, if it was read already.
        dtype: to load the weights in; "auto" is the checkpoint's own.
        device: where to.

    Raises:
        ConfigError: the weights are broken, or not those of the configuration.
    """
    config = config or read_config(path)
    check_complete(path, config)
    from transformers import AutoModelForCausalLM

    classes: Any = AutoModelForCausalLM
    try:
        model, info = classes.from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
    except Exception as exc:
        raise ConfigError(f"{path}: the weights cannot be loaded ({_one_line(exc)}); download them again") from exc
    refuse_incomplete(path, info)
    return model.to(device).eval().requires_grad_(False)


def refuse_unsupported(config: Any, max_context: int) -> None:
    """Refuses what the paged attention does not do, unless no sequence gets long enough for it to matter.

    Raises:
        ConfigError: names the field of config.json and the remedy.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigError(f"{config.model_type} is an encoder-decoder; the torch engine serves decoder-only models")
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        kind = "is multimodal (it has a text_config)" if text is not config else "is no causal language model"
        raise ConfigError(
            f"{config.model_type} {kind}: transformers has no class for it that the torch engine can serve; take a "
            "model of text alone, or the tensorrt_llm engine"
        )
    for layer_type, field in _windows(text).items():
        size = getattr(text, field, None) if field else None
        if size is None or size < max_context:
            window = f" ({field} {size}; max_seq_len is {max_context})" if size else ""
            remedy = f"Set max_seq_len to {size} or less, serve" if size else "Serve"
            raise ConfigError(
                f"{config.model_type} has layers of type {layer_type}{window}; the torch engine does full_attention "
                f"only. {remedy} the model with the tensorrt_llm engine, or choose a model without such layers"
            )
    for rope_type, border in _rope_borders(text):
        if border < max_context:
            raise ConfigError(
                f"{config.model_type} has rope_type {rope_type!r}, which rotates every token of a sequence otherwise "
                f"once it has more than {border} tokens, and max_seq_len is {max_context}; set max_seq_len to {border} "
                "or less"
            )


def _windows(text: Any) -> dict[str, str | None]:
    """Types of layers that do not see the whole sequence, with the field that says how much they see, if known."""
    fields = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    types = getattr(text, "layer_types", None)
    if types is None:
        slides = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
        types = ["sliding_attention"] if slides else []
    return {name: fields.get(name) for name in sorted(set(types) - {"full_attention"})}


def _rope_borders(text: Any) -> Iterator[tuple[str, int]]:
    """Lengths beyond which transformers takes other frequencies for a whole batch (`dynamic_rope_update`)."""
    parameters = getattr(text, "rope_parameters", None) or {}
    for part in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        rope_type = str(part.get("rope_type", ""))
        border = getattr(text, "max_position_embeddings", None) if "dynamic" in rope_type else None
        if rope_type == "longrope":
            border = part.get("original_max_position_embeddings")
        if border is not None:
            yield rope_type, border


def read_facts(model: Any) -> ModelFacts:
    """Reads the sizes of a model.

    Raises:
        ConfigError: it has none that hold for all layers.
    """
    config = model.config.get_text_config(decoder=True)
    try:
        return _facts(model, config)
    except (AttributeError, TypeError) as exc:
        raise ConfigError(
            f"{model.config.model_type}: the torch engine needs one number of heads and one head size for all layers "
            f"({_one_line(exc)}); serve it with the tensorrt_llm engine"
        ) from exc


def _facts(model: Any, config: Any) -> ModelFacts:
    heads: int = config.num_attention_heads
    return ModelFacts(
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        hidden_size=config.hidden_size,
        vocab_size=model.get_output_embeddings().weight.shape[0],
        max_position_embeddings=position_limit(model.config),
        dtype=model.dtype,
    )


def split(model: Any) -> tuple[nn.Module, nn.Module]:
    """The decoder, which ends with the final norm, and the LM head."""
    return model.base_model, model.get_output_embeddings()


@torch.inference_mode()
def probe(model: Any, max_context: int) -> Probe:
    """Runs the model with its own attention, then switches it to the paged attention.

    The tokens go beyond every length at which the model computes otherwise, if sequences get that long.

    Raises:
        ConfigError: the model itself fails, or takes no other attention.
    """
    length = min(max([PROBE_TOKENS, *(border + 4 for border in _borders(model.config, max_context))]), max_context)
    vocab_size: int = model.get_output_embeddings().weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, (1, length), generator=generator)
    inputs = tokens.to(model.device)
    try:
        logits = model(input_ids=inputs, attention_mask=torch.ones_like(inputs), use_cache=False).logits[0]
    except Exception as exc:  # sizes in config.json that pass every check but do not go together
        raise ConfigError(
            f"{model.config.model_type}: transformers' own model fails on {length} tokens ({_one_line(exc)}); correct "
            "config.json, or download the checkpoint again"
        ) from exc
    attention.register()
    try:
        model.set_attn_implementation(attention.NAME)
    except ValueError as exc:
        raise ConfigError(f"{model.config.model_type} cannot use another attention function: {exc}") from exc
    return Probe(tokens[0].tolist(), logits.float(), TOLERANCES.get(model.dtype, max(TOLERANCES.values())))


def _borders(config: Any, max_context: int) -> list[int]:
    """Lengths below `max_context` that a configuration names: of windows, and of rope scaling that changes there."""
    text = config.get_text_config(decoder=True)
    named = [getattr(text, name, None) for name in ("sliding_window", "attention_chunk_size", "window_size")]
    sizes = [*named, *(border for _, border in _rope_borders(text))]
    return [size for size in sizes if isinstance(size, int) and size < max_context]


def probe_spans(num_tokens: int, max_num_tokens: int) -> Iterator[tuple[int, int]]:
    """Cuts the probe into an extend, a decode and further extends, within the limit of one step."""
    start = 0
    for size in (4, 1, *[max(3, num_tokens // 4)] * num_tokens):
        stop = min(start + min(size, max_num_tokens), num_tokens)
        if stop > start:
            yield start, stop
        start = stop


def compare(probe: Probe, position: int, logits: Tensor) -> None:
    """Raises ConfigError if `logits` [V] are not the probe's at that position."""
    expected = probe.logits[position]
    difference = float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not difference <= probe.tolerance:  # written so that NaN fails too
        raise ConfigError(
            f"the torch engine's logits differ from the model's own by {difference:.1e} of their size: the "
            "architecture does something that this engine does not know. Serve it with the tensorrt_llm engine"
        )
