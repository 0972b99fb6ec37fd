"""How long the blocks of a request are worth keeping."""

from __future__ import annotations

from typing import Any

from tensorrt_llm._table import Fields

_PATH = "tensorrt_llm.llmapi.KvCacheRetentionConfig"


class TokenRangeRetentionConfig(Fields, path=f"{_PATH}.TokenRangeRetentionConfig", error=TypeError):
    """Priority of a range of prompt tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check(self.priority)


class KvCacheRetentionConfig(Fields, path=_PATH, error=TypeError):
    """Priorities of a request's blocks."""

    TokenRangeRetentionConfig = TokenRangeRetentionConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _check(self.decode_retention_priority)


def _check(priority: int) -> None:
    if not 0 <= priority <= 100:
        raise RuntimeError(f"Invalid priority value {priority}: it lies between 0 and 100")
