"""From token ids to the text that a client sees, in pieces that depend on the tokens alone.

Triton merges tokens into one response when they come faster than they can be sent, so the text of a response would
come in pieces that depend on timing. Here every token is looked at alone: it gives out text, or waits until it is
clear that no stop word begins in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from tokenrouter.text import TextStream


@dataclass(slots=True)
class Token:
    """One token of a response, as Triton reports it."""

    id: int
    log_prob: float | None = None
    writer: str = ""


@dataclass(slots=True)
class Piece:
    """Text that is given out together, and the tokens that it completes."""

    text: str
    tokens: list[Token] = field(default_factory=list)


class PieceStream:
    """Turns tokens into pieces. Stop words, and what stands behind the first of them, are not given out.

    Args:
        tokenizer: the deployment's.
        prompt: token ids of the prompt.
        stop: stop words, none of them empty.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str]) -> None:
        self._text = TextStream(tokenizer, prompt)
        self._stop = tuple(stop)
        self._held = ""
        self._tokens: list[Token] = []
        self.stopped = False

    def push(self, tokens: Iterable[Token]) -> list[Piece]:
        """The pieces that these tokens complete; none once a stop word has come."""
        pieces = []
        for token in tokens:
            if self.stopped:
                break
            self._tokens.append(token)
            pieces += self._release(self._text.push(token.id), last=False)
        return pieces

    def flush(self) -> list[Piece]:
        """What is left at the end."""
        return [] if self.stopped else self._release(self._text.flush(), last=True)

    def _release(self, text: str, *, last: bool) -> list[Piece]:
        self._held += text
        begins = [at for word in self._stop if (at := self._held.find(word)) >= 0]
        if begins:
            self.stopped = True
            text, self._held = self._held[: min(begins)], ""
        else:
            keep = 0 if last else self._open_end()
            cut = len(self._held) - keep
            text, self._held = self._held[:cut], self._held[cut:]
        if not text and not (self.stopped or last):
            return []
        tokens, self._tokens = self._tokens, []
        return [Piece(text, tokens)] if text or tokens else []

    def _open_end(self) -> int:
        """Length of the longest end of the held text with which a stop word may begin."""
        longest = max((len(word) for word in self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(word.startswith(self._held[-length:]) for word in self._stop):
                return length
        return 0
