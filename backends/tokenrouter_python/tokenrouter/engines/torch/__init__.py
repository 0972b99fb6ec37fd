"""The torch engine: forward passes on a CPU or a CUDA device, with a paged KV cache."""

from tokenrouter.engines.torch.config import KvCacheConfig, TorchEngineConfig
from tokenrouter.engines.torch.engine import SequenceHandle, TorchEngine
from tokenrouter.engines.torch.threads import default_threads, granted_cores

__all__ = [
    "KvCacheConfig",
    "SequenceHandle",
    "TorchEngine",
    "TorchEngineConfig",
    "default_threads",
    "granted_cores",
]
