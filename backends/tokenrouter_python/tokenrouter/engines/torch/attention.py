"""Attention over the paged cache, plugged into transformers' own models.

Transformers looks the attention function up by name for every layer. Ours stores the new keys and values in the cache
and attends to what the cache holds, so transformers' modelling code serves any decoder-only architecture unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from tokenrouter.engines.torch.batch import Group, PackedStep
from tokenrouter.engines.torch.cache import PagedCache
from tokenrouter.errors import ConfigError

NAME = "tokenrouter_paged"
_ATTRIBUTE = "tokenrouter_attention"

AttentionOutput: TypeAlias = "tuple[Tensor, None]"


@dataclass(slots=True)
class AttentionState:
    """What the attention function of one engine works on; every attention layer of its model refers to it.

    Attributes:
        cache: the engine's cache.
        max_context: most tokens of a sequence; a window of as many hides nothing.
        step: the step that is running.
        checking: true while the engine checks at load time that this function can serve the model.
    """

    cache: PagedCache
    max_context: int
    step: PackedStep | None = None
    checking: bool = False


def register() -> None:
    """Makes the attention function known to transformers. Repeating it is harmless."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, paged_attention)
    # Masks depend on the groups of a step and are built with them; transformers shall build none.
    AttentionMaskInterface.register(NAME, _no_mask)


def attach(model: nn.Module, state: AttentionState | None) -> None:
    """Lets the attention layers of `model` find their engine's state; None detaches.

    It hangs on the modules, since not every architecture passes keyword arguments down to its attention layers.
    """
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            setattr(module, _ATTRIBUTE, state)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> AttentionOutput:
    """Attention of one layer for a packed batch.

    Args:
        module: the attention layer.
        query: [1, heads, T, head_dim], rotated.
        key: [1, kv_heads, T, head_dim], rotated.
        value: [1, kv_heads, T, head_dim].
        attention_mask: unused; the step has its own.
        scaling: factor on the scores; None for 1 / sqrt(head_dim).
        kwargs: what transformers passes to other implementations.

    Returns:
        [1, T, heads, head_dim], and no attention weights.
    """
    state: AttentionState = getattr(module, _ATTRIBUTE)
    if state.checking:
        _refuse_what_is_ignored(kwargs, state.max_context)
    step = state.step
    assert step is not None
    layer: int = module.layer_idx  # type: ignore[assignment]
    packed = query[0].transpose(0, 1)
    state.cache.write(layer, step.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    outputs = [_attend(state.cache, layer, group, packed, scaling) for group in step.groups]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0), None


def _attend(cache: PagedCache, layer: int, group: Group, packed: Tensor, scaling: float | None) -> Tensor:
    """One group's outputs, [stop - start, heads, head_dim], for queries packed as [T, heads, head_dim]."""
    keys, values = cache.gather(layer, group.block_ids, group.num_sequences, group.length)
    heads, kv_heads, dim = packed.shape[1], keys.shape[1], packed.shape[2]
    if group.num_queries == 1:
        # All query heads that share a key head are just more queries to it: no keys need to be repeated.
        queries = packed[group.start : group.stop].reshape(group.num_sequences, kv_heads, heads // kv_heads, dim)
        output = scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask, scale=scaling)
        return output.reshape(group.num_sequences, heads, dim)
    queries = packed[group.start : group.stop] if group.pad is None else packed.index_select(0, group.pad)
    queries = queries.reshape(group.num_sequences, group.num_queries, heads, dim).transpose(1, 2)
    output = scaled_dot_product_attention(
        queries, keys, values, attn_mask=group.mask, scale=scaling, enable_gqa=heads != kv_heads
    )
    output = output.transpose(1, 2).reshape(-1, heads, dim)
    return output if group.unpad is None else output.index_select(0, group.unpad)


def _refuse_what_is_ignored(kwargs: dict[str, Any], max_context: int) -> None:
    """Raises ConfigError for an argument that changes the result and that this function does not honour."""
    for name in ("sliding_window", "softcap", "s_aux", "position_bias", "block_indices"):
        value = kwargs.get(name)
        if value is not None and not (name == "sliding_window" and value >= max_context):
            raise ConfigError(
                f"this model's attention layers use {name!r}, which the torch engine's paged attention does not do; "
                "serve the model with the tensorrt_llm engine"
            )
    if kwargs.get("is_causal") is False:
        raise ConfigError("this model's attention is not causal; the torch engine serves decoder-only models")


def _no_mask(*_: Any, **__: Any) -> None:
    return None
