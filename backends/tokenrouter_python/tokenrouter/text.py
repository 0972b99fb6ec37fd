"""Token ids to text, one token at a time, and stop words on that text."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_CONTEXT_TOKENS = 6


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
        self._stream = DecodeStream(ids=list(prompt[-_CONTEXT_TOKENS:]), skip_special_tokens=True)
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token completes, often ""."""
        self._pending.append(token)
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception:
            # The stream refuses ids whose text does not extend what it gave before (broken UTF-8); start afresh.
            self._stream = DecodeStream(skip_special_tokens=True)
            text = self._decode_pending()
        if text is None:
            return ""
        self._pending.clear()
        return str(text)

    def flush(self) -> str:
        """What is left when the response ends in the middle of a character: replacement marks, or ""."""
        return self._decode_pending() if self._pending else ""

    def _decode_pending(self) -> str:
        text = str(self._tokenizer.decode(self._pending, skip_special_tokens=True))
        self._pending.clear()
        return text


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
        self._tail = window[len(window) - self._keep :] if self._keep else ""
        return min(ends) - seen if ends else None

    @staticmethod
    def _end(word: str, window: str, seen: int) -> int | None:
        begin = window.find(word, max(0, seen - len(word) + 1))
        return None if begin < 0 else begin + len(word)
