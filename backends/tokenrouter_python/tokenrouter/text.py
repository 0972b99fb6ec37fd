"""Token ids to text, one token at a time, and stop words on that text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tokenrouter.tokenization import special_tokens

_CONTEXT_TOKENS = 8
_PROMPT_TOKENS = 64
# A character has at most 4 bytes, so at most this many tokens can be the beginning of one.
_UNFINISHED_TOKENS = 3
# So many tokens without text are no unfinished character; waiting on would cost a decode of all of them per token.
_STUCK_TOKENS = 16
_BROKEN = "\ufffd"


class TextStream:
    """Incremental detokenizer of one response.

    The concatenation of everything `push` and `flush` return is the response's text; a character of several bytes comes
    out when its last byte has arrived, whichever models wrote the bytes. Special tokens give no text.

    Args:
        tokenizer: the deployment's tokenizer.
        prompt: the prompt's token ids; the last few are context, so that a leading space is not lost.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer)
        visible = (token for token in prompt[-_PROMPT_TOKENS:] if token not in self._special)
        self._recent: deque[int] = deque(visible, maxlen=_CONTEXT_TOKENS)
        self._stream = self._begin(list(self._recent))
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token completes, often ""."""
        if token in self._special:
            return ""
        self._recent.append(token)
        return self._step(token)

    def flush(self) -> str:
        """What is left when the response ends in the middle of a character: replacement marks, or ""."""
        text = self._decode(self._pending)
        self._pending = []
        return text

    def _begin(self, context: list[int]) -> DecodeStream:
        """A stream behind these tokens; without those of a broken character, which it would give out once more."""
        while context and self._decode(context).endswith(_BROKEN):
            context.pop()
        return DecodeStream(ids=context, skip_special_tokens=True)

    def _step(self, token: int) -> str:
        self._pending.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:
            # The stream refuses ids whose text does not extend what it gave before (broken UTF-8).
            return self._restart(0)
        if text is not None:
            self._pending = []
            return str(text)
        return self._restart(self._unfinished()) if len(self._pending) >= _STUCK_TOKENS else ""

    def _unfinished(self) -> int:
        """How many of the last pending tokens may begin a character."""
        whole = self._decode(self._pending)
        for keep in range(_UNFINISHED_TOKENS, 0, -1):
            if self._decode(self._pending[:-keep]) + self._decode(self._pending[-keep:]) == whole:
                return keep
        return 0

    def _restart(self, keep: int) -> str:
        """Gives out what is pending but for the last `keep` tokens, and begins afresh behind it."""
        cut = len(self._pending) - keep
        done, rest = self._pending[:cut], self._pending[cut:]
        recent = list(self._recent)
        self._stream = self._begin(recent[: len(recent) - keep])
        self._pending = []
        return self._decode(done) + "".join([self._step(token) for token in rest])

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True)) if tokens else ""


class StopWords:
    """Finds the first stop word that ends in a growing text, wherever the pieces begin and end."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = [word for word in words if word]
        self._keep = max((len(word) for word in self._words), default=1) - 1
        self._tail = ""

    def __bool__(self) -> bool:
        return bool(self._words)

    def cut(self, delta: str) -> int | None:
        """Length of `delta` up to the end of the first match that ends in it, or None."""
        if not self._words or not delta:
            return None
        window = self._tail + delta
        seen = len(self._tail)
        ends = [end for word in self._words if (end := self._end(word, window, seen)) is not None]
        self._tail = window[-self._keep :] if self._keep else ""
        return min(ends) - seen if ends else None

    @staticmethod
    def _end(word: str, window: str, seen: int) -> int | None:
        begin = window.find(word, max(0, seen - len(word) + 1))
        return None if begin < 0 else begin + len(word)
