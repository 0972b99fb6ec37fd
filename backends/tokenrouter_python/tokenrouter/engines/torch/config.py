"""What an operator can set on a torch engine, and the sizes that follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from tokenrouter.config.model_yaml import MAX_BATCH_SIZE, TOKENS_PER_BLOCK
from tokenrouter.engines.torch import cgroup
from tokenrouter.errors import ConfigError

CPU_MAX_NUM_TOKENS = 512
CUDA_MAX_NUM_TOKENS = 8192
CPU_MEMORY_SHARE = 0.25
CUDA_MEMORY_SHARE = 0.4


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} is {value}; it must be at least 1")


class KvCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Paged KV cache; the field names are those of NVIDIA's LLM API.

    Attributes:
        tokens_per_block: tokens in one block.
        max_tokens: tokens the pool holds, rounded down to whole blocks. Default: every sequence of a full batch at
            full length, but not more than a quarter of the available memory (CUDA: 40 % of what is free after
            loading the weights).
    """

    tokens_per_block: int = TOKENS_PER_BLOCK
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        _require_positive("kv_cache_config.tokens_per_block", self.tokens_per_block)
        if self.max_tokens is not None and self.max_tokens < self.tokens_per_block:
            raise ConfigError(
                f"kv_cache_config.max_tokens is {self.max_tokens}, less than one block of {self.tokens_per_block} "
                "tokens; raise it, or remove it for the default"
            )


class TorchEngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Settings of a torch engine.

    Attributes:
        device: `cpu`, `cuda`, `cuda:N`, or `auto`: CUDA if there is any.
        dtype: of weights and cache. `auto`: float32 on the CPU, the checkpoint's own on CUDA.
        max_batch_size: most sequences in one step.
        max_num_tokens: most new tokens in one step. It bounds how long one step can keep the other requests waiting
            while somebody's long prompt is prefilled. Default: 512 on the CPU, 8192 on CUDA.
        max_seq_len: longest sequence, prompt included. Default: the model's max_position_embeddings.
        kv_cache_config: the paged KV cache.
        threads: CPU threads of this *process* for torch operators. Default: 1 for a model of less than 30 million
            parameters, otherwise this engine's part of the cores that are granted, shared with the other torch
            engines of the repository.
    """

    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    max_batch_size: int = MAX_BATCH_SIZE
    max_num_tokens: int | None = None
    max_seq_len: int | None = None
    kv_cache_config: KvCacheConfig = KvCacheConfig()
    threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "max_num_tokens", "max_seq_len", "threads"):
            value = getattr(self, name)
            if value is not None:
                _require_positive(name, value)
        if self.max_num_tokens is not None and self.max_num_tokens < self.max_batch_size:
            raise ConfigError(
                f"max_num_tokens is {self.max_num_tokens}, but a step of max_batch_size = {self.max_batch_size} "
                f"sequences has at least that many tokens; set max_num_tokens to {self.max_batch_size} or more"
            )

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any]) -> TorchEngineConfig:
        """Checks names and types of values read from a file.

        Raises:
            ConfigError: an unknown field, a wrong type or a value out of range; the message names the field.
        """
        try:
            return msgspec.convert(dict(raw), cls)
        except msgspec.ValidationError as exc:
            known = ", ".join(cls.__struct_fields__)
            raise ConfigError(f"engine settings: {exc}; known fields: {known}") from exc

    def resolve_device(self) -> torch.device:
        """The device to use.

        Raises:
            ConfigError: not a device, or CUDA was asked for and is not there.
        """
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            device = torch.device(self.device)
        except RuntimeError as exc:
            raise ConfigError(f"device is {self.device!r}; use cpu, cuda, cuda:N or auto") from exc
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device is {self.device!r}; use cpu, cuda, cuda:N or auto")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"device is {self.device!r}, but {torch.cuda.device_count()} CUDA devices exist; use cpu")
        return device

    def resolve_dtype(self, device: torch.device) -> torch.dtype | Literal["auto"]:
        """The dtype to load weights in; `auto` means the checkpoint's."""
        if self.dtype == "auto":
            return "auto" if device.type == "cuda" else torch.float32
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def resolve_seq_len(self, model_limit: int | None) -> int:
        """Longest sequence, given the model's max_position_embeddings (None if it states none).

        Raises:
            ConfigError: longer than the model can, or neither states a length.
        """
        if model_limit is None:
            if self.max_seq_len is None:
                raise ConfigError("the model states no max_position_embeddings; set max_seq_len")
            return self.max_seq_len
        if self.max_seq_len is not None and self.max_seq_len > model_limit:
            raise ConfigError(f"max_seq_len is {self.max_seq_len}, but the model takes at most {model_limit}; lower it")
        return self.max_seq_len or model_limit

    def resolve_num_tokens(self, device: torch.device) -> int:
        """Most new tokens in one step."""
        default = CUDA_MAX_NUM_TOKENS if device.type == "cuda" else CPU_MAX_NUM_TOKENS
        return self.max_num_tokens or max(default, self.max_batch_size)

    def resolve_kv_blocks(self, *, seq_len: int, bytes_per_token: int, device: torch.device) -> int:
        """Blocks of the KV pool.

        Raises:
            ConfigError: not even one block fits into the memory that may be used.
        """
        per_block = self.kv_cache_config.tokens_per_block
        if self.kv_cache_config.max_tokens is not None:
            return self.kv_cache_config.max_tokens // per_block
        wanted = self.max_batch_size * -(-seq_len // per_block)
        affordable = usable_memory(device) // (bytes_per_token * per_block)
        if affordable < 1:
            raise ConfigError("no memory is left for a KV cache; free some, or set kv_cache_config.max_tokens")
        return min(wanted, affordable)


def usable_memory(device: torch.device) -> int:
    """Bytes that a KV cache takes at most by default."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * CUDA_MEMORY_SHARE)
    return int(_available_host_memory() * CPU_MEMORY_SHARE)


def _available_host_memory() -> int:
    """Bytes that this host can still give, or the smallest memory limit of this process's cgroups."""
    limits = [2**30]  # where nothing is known, as outside Linux: a cautious gibibyte
    for line in cgroup.read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            limits = [int(line.split()[1]) * 1024]
    for version, folder in cgroup.folders("memory"):
        text = cgroup.read(folder / ("memory.max" if version == 2 else "memory.limit_in_bytes"))
        if text.isdigit():
            limits.append(int(text))
    return min(limits)
