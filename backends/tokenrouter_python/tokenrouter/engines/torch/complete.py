"""Whether a checkpoint's weights are those that its config.json describes: every tensor, of the right shape, no other.

Transformers fills what it does not find with random numbers and goes on. Which names it renames, merges, ties or
ignores is its own knowledge, so its loader is asked, with tensors that have shapes and no data.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch

from tokenrouter.errors import ConfigError
from tokenrouter.weights import StoredTensor, stored_tensors

_SHOWN = 4
# Constants that older releases of transformers stored beside the weights, and that are computed now.
_COMPUTED = (".masked_bias", ".inv_freq", ".position_ids")
_SILENT = logging.CRITICAL


def check_complete(folder: Path, config: Any) -> None:
    """Compares the headers of the safetensors files with the architecture; no weights are read.

    Args:
        folder: checkpoint; one without safetensors files is looked at when it is loaded, by `refuse_incomplete`.
        config: its configuration. Quantized weights have other tensors, which only their loader knows.

    Raises:
        ConfigError: names file and tensors.
    """
    stored = stored_tensors(folder)
    if stored and getattr(config, "quantization_config", None) is None:
        _refuse(folder, stored, _loading_info(config, stored))


def refuse_incomplete(folder: Path, info: dict[str, Any]) -> None:
    """Raises ConfigError unless everything was loaded; `info` is what transformers says after loading."""
    _refuse(folder, {}, info)


def _loading_info(config: Any, stored: dict[str, StoredTensor]) -> dict[str, Any]:
    """What transformers would report. Its loader's parts are private; where they changed, nothing is reported yet.

    Nor for a model without a causal language model, which TensorRT-LLM may know.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import get_verbosity, set_verbosity

    classes: Any = AutoModelForCausalLM
    tensors = {name: torch.empty(tensor.shape, device="meta") for name, tensor in stored.items()}
    before = get_verbosity()
    set_verbosity(_SILENT)
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.modeling_utils import LoadStateDictConfig

        with torch.device("meta"):
            model = classes.from_config(config)
        mapping: Any = get_model_conversion_mapping(model, None, None)
        settings = LoadStateDictConfig(ignore_mismatched_sizes=True, device_map={"": "meta"}, weight_mapping=mapping)
        info, _ = model._load_pretrained_model(model, tensors, None, settings)
        broken = set(info.conversion_errors)
        info.conversion_errors = {}
        info = model._finalize_model_loading(model, settings, info)
    except (ImportError, AttributeError, TypeError, ValueError):
        return {}
    finally:
        set_verbosity(before)
    return {**info.to_dict(), "conversion_errors": broken}


def _refuse(folder: Path, stored: dict[str, StoredTensor], info: dict[str, Any]) -> None:
    found = list(_differences(info))
    if found:
        files = sorted({tensor.file for tensor in stored.values()})
        raise ConfigError(
            f"{files[0] if len(files) == 1 else folder}: {'; '.join(found)}. The weights are not those that "
            "config.json describes: download or convert the checkpoint again, or correct config.json"
        )


def _differences(info: dict[str, Any]) -> Iterator[str]:
    unexpected = [name for name in info.get("unexpected_keys", ()) if not name.endswith(_COMPUTED)]
    info = {**info, "unexpected_keys": unexpected}
    for key, what in (
        ("missing_keys", "missing tensors"),
        ("unexpected_keys", "unexpected tensors"),
        ("conversion_errors", "tensors that are made of several, not all of which are there"),
    ):
        if info.get(key):
            yield f"{what}: {_listed(info[key])}"
    if info.get("mismatched_keys"):
        shapes = [f"{name} {list(has)} instead of {list(wanted)}" for name, has, wanted in info["mismatched_keys"]]
        yield f"tensors of another shape: {_listed(shapes)}"


def _listed(names: Collection[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(sorted(names)[:_SHOWN]) + more
