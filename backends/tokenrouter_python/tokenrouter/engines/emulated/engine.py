"""An engine without a model: known step times and scripted tokens, for tests and scheduling studies.

Step times are slept, with absolute deadlines. The tokens of a response repeat the prompt: position i prefers prompt
token i, by `margin` over noise that depends on the position only, so that every model of this engine gives the same
logits at the same position. After the prompt comes the end token, or the prompt again with `repeat`.

With `signals` logits and hidden states also show a certainty that differs between positions and models, so that real
policies and their routers decide as they would on a real model, and a model prefers other tokens at a given rate; see
`engines.emulated.signals`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch

from tokenrouter.checkpoint import end_ids, vocabulary_size
from tokenrouter.config.model_yaml import TOKENS_PER_BLOCK
from tokenrouter.engines.base import EngineInfo, EngineRow, PolicyExtras, StepResult, blocks_needed, nothing
from tokenrouter.engines.emulated.signals import (
    UNSURE_LOGIT,
    SignalsConfig,
    disagrees,
    prompt_key,
    sure_logit,
    unsure,
)
from tokenrouter.errors import ConfigError, EngineFailed
from tokenrouter.step_time import step_time_ms

_NOISE_ROWS = 61
_SPIN_S = 0.0002


class KvConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Size of the paged KV cache, in the words of NVIDIA's llmapi models."""

    tokens_per_block: int = TOKENS_PER_BLOCK
    max_tokens: int = 65_536

    def __post_init__(self) -> None:
        if not 1 <= self.tokens_per_block <= self.max_tokens:
            raise ValueError("tokens_per_block is at least 1 and at most max_tokens")


class EmulatedConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`engine_config` of the emulated engine in model.yaml.

    Attributes:
        step_ms: time of one step: a number, or a table batch size -> ms, continued by `tokenrouter.step_time`.
        extend_ms_per_token: added for every new token beyond one per request.
        hidden_size: width of the hidden states; 0 gives none. They are zeros, except for what `signals` says.
        margin: how far the preferred token's logit lies above the noise, which lies in [-1, 1].
        repeat: start the prompt over instead of ending the response.
        signals: how often the model is unsure, and agrees with others; without it, `margin` decides for all positions
            alike, and all models prefer the same tokens.
    """

    max_batch_size: int = 64
    max_num_tokens: int = 8192
    max_seq_len: int = 4096
    kv_cache_config: KvConfig = KvConfig()
    step_ms: float | dict[int, float] = 0.0
    extend_ms_per_token: float = 0.0
    hidden_size: int = 8
    margin: float = 10.0
    repeat: bool = False
    signals: SignalsConfig | None = None

    def __post_init__(self) -> None:
        if min(self.max_batch_size, self.max_num_tokens, self.max_seq_len, self.hidden_size + 1) < 1:
            raise ValueError("max_batch_size, max_num_tokens and max_seq_len are at least 1, hidden_size at least 0")
        table = self.step_ms if isinstance(self.step_ms, dict) else {1: self.step_ms}
        if not table or min(table.values()) < 0 or self.extend_ms_per_token < 0:
            raise ValueError("step_ms and extend_ms_per_token are at least 0, and a table has at least one entry")


@dataclass
class _Sequence:
    prompt_tokens: int
    blocks: int
    tokens: list[int] = field(default_factory=list)
    key: int | None = None

    @property
    def position(self) -> int:
        """Index in the response of the next token."""
        return len(self.tokens) - self.prompt_tokens

    def prompt_key(self) -> int:
        """Hash of the prompt, which is complete when logits are wanted; made once."""
        if self.key is None:
            self.key = prompt_key(self.tokens[: self.prompt_tokens])
        return self.key


_Place: TypeAlias = tuple[_Sequence, int]
"""A sequence, and the position in its response that logits are wanted for."""


class EmulatedEngine:
    """See the module's text. Satisfies `engines.base.Engine`.

    Args:
        config: see `EmulatedConfig`.
        vocab_size: width of the logits.
        end_id: the token after the prompt, or None (the noise decides).
        sleep: waits until a `time.perf_counter` value; replaced in tests.
    """

    def __init__(
        self,
        config: EmulatedConfig,
        *,
        vocab_size: int,
        end_id: int | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        kv = config.kv_cache_config
        self._config = config
        self._end_id = end_id
        self._sleep = sleep or sleep_until
        self._noise = torch.rand(_NOISE_ROWS, vocab_size, generator=torch.Generator().manual_seed(1)) * 2 - 1
        self._open: dict[int, _Sequence] = {}
        self._next_handle = 0
        self._leased = 0
        self._info = EngineInfo(
            name="emulated",
            vocab_size=vocab_size,
            hidden_size=config.hidden_size,
            max_context=config.max_seq_len,
            block_tokens=kv.tokens_per_block,
            kv_blocks=kv.max_tokens // kv.tokens_per_block,
            max_batch=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            emulated=True,
        )

    @classmethod
    def from_folder(cls, folder: Path, options: dict[str, Any]) -> EmulatedEngine:
        """Vocabulary size and end token come from the folder's tokenizer and config files.

        Raises:
            ConfigError: an option is unknown or out of range, or the tokenizer is missing.
        """
        try:
            config = msgspec.convert(options, EmulatedConfig)
        except msgspec.ValidationError as exc:
            raise ConfigError(f"{folder / 'model.yaml'}: engine_config: {exc}") from exc
        # Rows are narrow: threads that meet at barriers would add milliseconds to steps of known length.
        torch.set_num_threads(1)
        ends = end_ids(folder)
        return cls(config, vocab_size=vocabulary_size(folder), end_id=ends[0] if ends else None)

    @property
    def info(self) -> EngineInfo:
        return self._info

    @property
    def blocks_leased(self) -> int:
        """KV blocks reserved by open sequences."""
        return self._leased

    @property
    def blocks_used(self) -> int:
        """KV blocks that would hold at least one token."""
        return sum(blocks_needed(len(s.tokens), self._info.block_tokens) for s in list(self._open.values()))

    def open(self, *, kv_tokens: int, prompt_tokens: int) -> int:
        """Leases blocks as a real engine would.

        Raises:
            EngineFailed: the pool is exhausted or kv_tokens exceeds the context.
        """
        blocks = blocks_needed(kv_tokens, self._info.block_tokens)
        if kv_tokens > self._info.max_context or blocks > self._info.kv_blocks - self._leased:
            raise EngineFailed(
                f"{blocks} KV blocks wanted, {self._info.kv_blocks - self._leased} of {self._info.kv_blocks} are free"
            )
        self._leased += blocks
        self._next_handle += 1
        self._open[self._next_handle] = _Sequence(prompt_tokens, blocks)
        return self._next_handle

    def step(self, rows: Sequence[EngineRow], meanwhile: Callable[[], None] = nothing) -> StepResult:
        """Sleeps for the step time and prefers the scripted tokens. `meanwhile` is part of that time."""
        started = time.perf_counter()
        new_tokens = 0
        for row in rows:
            self._open[row.handle].tokens.extend(row.tokens)
            new_tokens += len(row.tokens)
        result = self._result([place for row in rows for place in self._places(row)])
        meanwhile()
        config = self._config
        duration_ms = step_time_ms(config.step_ms, len(rows)) + config.extend_ms_per_token * (new_tokens - len(rows))
        if duration_ms:
            self._sleep(started + duration_ms * 1e-3)
        return result

    def _places(self, row: EngineRow) -> list[_Place]:
        """The emitting positions of a row whose tokens are taken in."""
        sequence = self._open[row.handle]
        end = sequence.position + 1
        return [(sequence, position) for position in range(end - row.emit, end)]

    def _result(self, places: Sequence[_Place]) -> StepResult:
        """Logits [E, V] and hidden states [E, H]."""
        logits = self._noise[[position % _NOISE_ROWS for _, position in places]]
        hidden = torch.zeros(len(places), self._info.hidden_size) if self._info.hidden_size else None
        preferred = torch.full((len(places),), self._config.margin)
        tokens = [self._scripted(*place) for place in places]
        signals = self._config.signals
        if signals is not None and places:
            keys, positions = [s.prompt_key() for s, _ in places], [position for _, position in places]
            flags = torch.from_numpy(unsure(signals, keys, positions))
            preferred = torch.where(flags, UNSURE_LOGIT, sure_logit(self._config.margin, self._info.vocab_size))
            if hidden is not None:
                hidden[:, 0] = torch.where(flags, 1.0, -1.0)
            differs = disagrees(signals, keys, positions)
            tokens = [self._another(token) if no else token for token, no in zip(tokens, differs, strict=True)]
        index = [i for i, token in enumerate(tokens) if token is not None]
        logits[index, [token for token in tokens if token is not None]] = preferred[index]
        return StepResult(logits, hidden)

    def _scripted(self, sequence: _Sequence, position: int) -> int | None:
        if self._config.repeat:
            position %= sequence.prompt_tokens
        return sequence.tokens[position] if position < sequence.prompt_tokens else self._end_id

    def _another(self, token: int | None) -> int | None:
        """Another token than this one, which ends nothing; the end of a response stays."""
        if token is None or token == self._end_id:
            return token
        others = [(token + step) % self._info.vocab_size for step in (1, 2)]
        return others[0] if others[0] != self._end_id else others[1]

    def truncate(self, handle: int, length: int) -> None:
        """Forgets tokens from `length` on."""
        del self._open[handle].tokens[length:]

    def close(self, handle: int) -> None:
        sequence = self._open.pop(handle, None)
        if sequence is not None:
            self._leased -= sequence.blocks

    def extras(self, model: str) -> PolicyExtras:
        """Nothing: there are no weights."""
        return {}

    def shutdown(self) -> None:
        self._open.clear()


def sleep_until(deadline: float) -> None:
    """Sleeps until `time.perf_counter()` reaches `deadline`; the last fraction of a millisecond is spun."""
    remaining = deadline - time.perf_counter() - _SPIN_S
    if remaining > 0:
        time.sleep(remaining)
    while time.perf_counter() < deadline:
        pass
