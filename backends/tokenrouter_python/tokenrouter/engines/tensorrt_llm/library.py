"""The installed TensorRT-LLM: import, construction, calls with what its version offers."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from packaging.version import InvalidVersion, Version

from tokenrouter.engines.tensorrt_llm import facts
from tokenrouter.engines.tensorrt_llm.config import NESTED, TensorRtLlmConfig
from tokenrouter.engines.tensorrt_llm.probe import PoolProbe
from tokenrouter.engines.tensorrt_llm.processor import VisitProcessor
from tokenrouter.engines.tensorrt_llm.token_ids import TokenIds
from tokenrouter.errors import ConfigError

log = logging.getLogger(__name__)

_SALT = "tokenrouter"
_PRIORITY = 100
# Blocks of a response that does not come back for so long lose their priority.
_RETENTION = timedelta(seconds=60)
_NEEDED_ARGUMENTS = ("disable_overlap_scheduler", "kv_cache_config", "scheduler_config")


class Library:
    """One `LLM`. Construction takes minutes, must not run on an event loop, and comes after `clean_environment`.

    Args:
        config: settings.

    Raises:
        ConfigError: it is not installed, or cannot do what the settings say.
    """

    def __init__(self, config: TensorRtLlmConfig) -> None:
        try:
            module, self._api = (importlib.import_module(name) for name in ("tensorrt_llm", "tensorrt_llm.llmapi"))
        except ImportError as exc:
            raise ConfigError(f"engine tensorrt_llm: the package cannot be imported ({exc}); see docs") from exc
        refuse_unsafe(module.__version__)
        self._sampling = module.SamplingParams
        for processor in (VisitProcessor, PoolProbe):
            # Without being a subclass, it can be imported where the library is not.
            importlib.import_module("tensorrt_llm.sampling_params").LogitsProcessor.register(processor)
        self._offered = frozenset(inspect.signature(module.LLM.generate_async).parameters)
        for name in sorted({"kv_cache_retention_config", "cache_salt"} - self._offered):
            log.warning("TensorRT-LLM %s: generate_async has no %s; it is left out", module.__version__, name)
        known = inspect.signature(module.SamplingParams).parameters
        timed = bool(config.arguments.get("enable_iter_perf_stats")) and "return_perf_metrics" in known
        self._timed = {"return_perf_metrics": True} if timed else {}
        self.llm = module.LLM(**self._arguments(config))

    def _arguments(self, config: TensorRtLlmConfig) -> dict[str, Any]:
        """What this version's `LLM` knows of our arguments, nested ones as its own objects."""
        arguments = _known(self._api.TorchLlmArgs, config.arguments, "", config.given | set(_NEEDED_ARGUMENTS))
        for key, name in NESTED.items():
            if isinstance(arguments.get(key), Mapping):
                cls = getattr(self._api, name)
                arguments[key] = cls(**_known(cls, arguments[key], f"{key}.", frozenset()))
        return arguments

    def generate(
        self, tokens: Sequence[int], *, max_tokens: int, end_id: int | None, stop_ids: Sequence[int], processor: Any
    ) -> Any:
        """A running request; called with a running event loop, which then may iterate over it.

        Args:
            tokens: prompt, ids.
            max_tokens: to write.
            end_id: at which it ends, or None.
            stop_ids: at which it ends as well. The library looks for them in a loop of its own, in every step.
            processor: leaves one token of each row.
        """
        params = self._sampling(
            max_tokens=max_tokens,
            # It has to be set, even if it means nothing.
            end_id=0 if end_id is None else end_id,
            ignore_eos=end_id is None,
            stop_token_ids=list(stop_ids) or None,
            # The processor leaves one token; greedy takes it.
            top_k=1,
            detokenize=False,
            logits_processor=processor,
            **self._timed,
        )
        optional = {"kv_cache_retention_config": self._retention(), "cache_salt": _SALT}
        return self.llm.generate_async(
            {"prompt_token_ids": TokenIds(tokens)},
            sampling_params=params,
            streaming=True,
            **{name: value for name, value in optional.items() if name in self._offered},
        )

    def _retention(self) -> Any:
        config = self._api.KvCacheRetentionConfig
        everything = config.TokenRangeRetentionConfig(0, None, _PRIORITY, _RETENTION)
        return config([everything], _PRIORITY, _RETENTION)

    def shutdown(self) -> None:
        """Ends the engine's processes."""
        self.llm.shutdown()


def refuse_unsafe(version: str) -> None:
    """Refuses releases that are known to give wrong tokens.

    Raises:
        ConfigError: names the release and the remedy.
    """
    try:
        installed = Version(version)
    except InvalidVersion:
        log.warning("TensorRT-LLM %r: not a version; the adapter was written for %s", version, facts.VERSION)
        return
    fixed = facts.FIRST_SAFE_PRERELEASE if installed.release[:2] == (1, 3) else facts.VERSION
    if installed < Version(fixed):
        raise ConfigError(
            f"TensorRT-LLM {version} is installed: {facts.UNSAFE}; install {facts.VERSION} (NVIDIA's Triton image "
            f"26.04 or later){'' if fixed == facts.VERSION else f', or {fixed} or later'}"
        )


def _known(cls: Any, given: Mapping[str, Any], prefix: str, needed: frozenset[str]) -> dict[str, Any]:
    """`given` without names that this version does not know; a needed one is an error."""
    fields = getattr(cls, "model_fields", None) or inspect.signature(cls).parameters
    missing = sorted(given.keys() - set(fields))
    for name in missing:
        if name in needed:
            raise ConfigError(f"model.yaml: {prefix}{name} is unknown to the installed TensorRT-LLM; remove it")
        log.warning("the installed TensorRT-LLM knows no %s%s; it is left out", prefix, name)
    return {name: value for name, value in given.items() if name not in missing}
