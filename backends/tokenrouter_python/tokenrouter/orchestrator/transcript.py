"""What the models have written of one response: tokens, their text and log-probabilities, and who wrote them.

The orchestrator is the only owner of a response. A token counts once it was committed here, whoever wrote it; models
hold copies, as far as they were told.
"""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer

from tokenrouter.request import GenerationRequest
from tokenrouter.response import Run, Update
from tokenrouter.text import StopWords, TextStream


class Transcript:
    """The response to one request, as far as it is written.

    Attributes:
        tokens: ids; the prompt is not among them.
        log_probs: of each token, if asked for.
        runs: who wrote what.
        text: of the whole response, once it is finished.
        stopped: whether a stop word has ended it.
        first_token_ns, last_token_ns: when the first and the last tokens were committed; 0 = not yet.
    """

    def __init__(self, key: int, request: GenerationRequest, tokenizer: Tokenizer) -> None:
        self.tokens: list[int] = []
        self.log_probs: list[float] = []
        self.runs: list[Run] = []
        self.text = ""
        self.stopped = False
        self.first_token_ns = 0
        self.last_token_ns = 0
        self._key = key
        self._stream = request.stream
        self._min_tokens = request.sampling.min_tokens
        self._stop = StopWords(request.stop_words)
        self._text = TextStream(tokenizer, request.tokens)
        self._tokenizer = tokenizer
        self._parts: list[str] = []
        self._unwritten: list[Update] = []

    def commit(
        self, tokens: list[int], log_probs: list[float] | None, *, model: str, now_ns: int, update: Update | None = None
    ) -> Update:
        """Appends what a model wrote; at least one token.

        Args:
            update: one that was returned just before, to which this is added; no `write` was in between.

        The text follows with `write`, because a hand-off need not wait for it. With stop words it is written at once,
        and tokens behind a match are dropped.
        """
        text = ""
        if self._stop:
            text, tokens = self._until_stop(tokens)
        start = len(self.tokens)
        self.tokens += tokens
        end = len(self.tokens)
        log_probs = log_probs[: end - start] if log_probs else []
        self.log_probs += log_probs
        if self.runs and self.runs[-1].model == model:
            self.runs[-1].end = end
        else:
            self.runs.append(Run(model, start, end))
        self.first_token_ns = self.first_token_ns or now_ns
        self.last_token_ns = now_ns
        new = Update(self._key, text, tokens, log_probs, [Run(model, start, end)])
        if update is not None:
            update.merge(new)
            return update
        if not self._stop:
            self._unwritten.append(new)
        return new

    def write(self) -> None:
        """Turns what was committed into text, and fills it in where it is told."""
        for update in self._unwritten:
            update.text = "".join(map(self._text.push, update.tokens))
            self._parts.append(update.text)
        self._unwritten.clear()

    def finish(self, update: Update | None) -> Update:
        """The response is over: the last update, with the rest of the text, or with everything if nothing was streamed.

        Args:
            update: of the tokens committed just now, if any.
        """
        self.write()
        rest = self._text.flush()
        self.text = "".join([*self._parts, rest])
        if not self._stream:
            return Update(self._key, self.text, self.tokens, self.log_probs, self.runs)
        update = update or Update(self._key)
        update.text += rest
        return update

    def texts(self, tokens: Iterable[int]) -> list[str]:
        """The text of each token by itself; "" of one below 0."""
        return self._tokenizer.decode_batch(
            [[token] if token >= 0 else [] for token in tokens], skip_special_tokens=False
        )

    def tokens_by_model(self, models: Iterable[str]) -> dict[str, int]:
        """Tokens that each of these models wrote."""
        counts = dict.fromkeys(models, 0)
        for run in self.runs:
            counts[run.model] += run.end - run.start
        return counts

    def _until_stop(self, tokens: list[int]) -> tuple[str, list[int]]:
        """Text and tokens up to the end of a stop word, if one ends in them."""
        texts: list[str] = []
        for count, token in enumerate(tokens, start=1):
            text = self._text.push(token)
            # Always asked, because a stop word may begin before min_tokens and end after.
            cut = self._stop.cut(text)
            self.stopped = cut is not None and len(self.tokens) + count > self._min_tokens
            texts.append(text[:cut] if self.stopped else text)
            if self.stopped:
                break
        self._parts += texts
        return "".join(texts), tokens[: len(texts)]
