"""Runs both models of a pair over a set of questions and labels every token of the answers.

One model is in memory at a time. Greedy throughout, as in the sources of R2R and Co-LLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor

from tokenrouter.checkpoint import end_ids, load_tokenizer
from tokenrouter.errors import ConfigError
from tokenrouter.tokenization import encode_prompt
from tokenrouter.vocabulary import check_same_tokenizer
from tools.progress import counted
from tools.train_router import features, labels
from tools.train_router.corpus import Corpus, Facts
from tools.train_router.decoding import greedy
from tools.train_router.features import Text
from tools.train_router.pair import Pair, engine_of, model_of
from tools.train_router.problems import Checker, Example


@dataclass(frozen=True)
class Task:
    """What is collected.

    Attributes:
        checker: judges answers; None = labels by comparison of texts.
        text: whose text the small model reads: `large` answers (R2R) or `gold` completions (CITER, Co-LLM).
        sentence: without a checker, longest continuation that is compared, in tokens.
    """

    examples: Sequence[Example]
    checker: Checker | None
    text: Literal["large", "gold"] = "large"
    max_tokens: int = 160
    sentence: int = 32
    top: int = 100


@dataclass(frozen=True)
class Answers:
    """The large model's tokens of each answer, the end id included, and whether each model's answer is right."""

    large: list[list[int]]
    small_right: list[bool | None]
    large_right: list[bool | None]


class Collector:
    """Collects one corpus; `run` does everything."""

    def __init__(self, pair: Pair, task: Task) -> None:
        check_same_tokenizer({"small": pair.small, "large": pair.large})
        self.pair, self.task = pair, task
        self.tokenizer: Tokenizer = load_tokenizer(pair.small)
        self.ends = frozenset(end_ids(pair.small))
        if not self.ends:
            raise ConfigError(f"{pair.small} names no eos_token_id: nobody can tell where an answer ends")
        self.prompts = [encode_prompt(self.tokenizer, example.prompt) for example in task.examples]

    @cached_property
    def sentence_ends(self) -> frozenset[int]:
        """Ids that end a sentence, or the answer."""
        return self.ends | labels.sentence_ends(self.tokenizer)

    def answers(self) -> Answers:
        small = self.decode(self.pair.small, self.prompts, "answers of the small model")
        large = self.decode(self.pair.large, self.prompts, "answers of the large model")
        return Answers(large, self.judge(small), self.judge(large))

    def run(self, answers: Answers | None = None) -> Corpus:
        """Answers, features, labels.

        Args:
            answers: to these questions, if they are there already.

        Raises:
            ConfigError: a folder cannot be served, or no text remains to train on.
        """
        answers = answers or self.answers()
        kept, texts = self.texts(answers.large, answers.large_right)
        if not texts:
            raise ConfigError(f"no {self.task.text} text is usable: they are unfinished, wrong, or not there")
        small = self.prefill(self.pair.small, texts, self.task.top, "features of the small model")
        large = self.prefill(self.pair.large, texts, 1, "choices of the large model").token
        target = torch.tensor([token for text in texts for token in text.answer])
        places = [(i, k) for i, text in enumerate(texts) for k in range(len(text.answer))]
        names = (str(self.pair.small), str(self.pair.large))
        return Corpus(
            facts=Facts(
                self.pair.names,
                names,
                self.task.text,
                list(self.task.examples),
                answers.small_right,
                answers.large_right,
            ),
            hidden=small.hidden,
            top_logits=small.top_logits,
            small_token=small.token,
            large_token=large,
            target=target,
            example=torch.tensor([kept[i] for i, _ in places]),
            divergent=self.divergent(kept, texts, places, small.token, target),
            sufficient=self.sufficient(kept, texts, places, small.token, large, target),
        )

    def texts(self, answers: list[list[int]], right: list[bool | None]) -> tuple[list[int], list[Text]]:
        """Indices of usable examples, and their texts: finished answers that are not known to be wrong, or gold."""
        if self.task.text == "gold":
            end = min(self.ends)
            kept = [i for i, example in enumerate(self.task.examples) if example.completion]
            return kept, [Text(self.prompts[i], [*self._encode(self.task.examples[i].completion), end]) for i in kept]
        kept = [i for i, answer in enumerate(answers) if answer[-1] in self.ends and right[i] is not False]
        return kept, [Text(self.prompts[i], answers[i]) for i in kept]

    def _encode(self, text: str | None) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text or "", add_special_tokens=False).ids
        return ids

    def judge(self, answers: Sequence[Sequence[int]]) -> list[bool | None]:
        """Whether each answer is right; None where no checker or no right answer is known."""
        return [self.verdict(i, answer) for i, answer in enumerate(answers)]

    def verdict(self, example: int, tokens: Sequence[int]) -> bool | None:
        """Whether a response to an example is right, or None."""
        asked = self.task.examples[example]
        if self.task.checker is None or asked.answer is None:
            return None
        return self.task.checker(asked.prompt, self.tokenizer.decode(list(tokens)), asked.answer)

    def divergent(
        self, kept: list[int], texts: list[Text], places: list[tuple[int, int]], small: Tensor, target: Tensor
    ) -> Tensor:
        """R2R's labels [T]: the large model continues from every mismatching token of the small one.

        With a checker: divergent iff the continued answer is wrong. Without: iff the sentence differs from the text's.
        Only for the large model's own answers; a reference text's continuation says nothing of the large model.
        """
        index = labels.mismatches(small, target, self.ends)
        if self.task.text == "gold":
            return labels.divergent(len(small), index, [None] * len(index))
        starts = [(*places[row], int(small[row])) for row in index.tolist()]
        # An end of text is final; nothing continues it.
        prefixes = [[*texts[i].prompt, *texts[i].answer[:k], token] for i, k, token in starts]
        open_ended = [n for n, (_, _, token) in enumerate(starts) if token not in self.ends]
        ends, limit = self.ends, self.task.max_tokens
        if self.task.checker is None:
            ends, limit = self.sentence_ends, self.task.sentence
        continued: list[list[int]] = [[] for _ in starts]
        found = self.decode(
            self.pair.large, [prefixes[n] for n in open_ended], "continuations by the large model", limit, ends
        )
        for n, tokens in zip(open_ended, found, strict=True):
            continued[n] = tokens
        verdicts = [
            self.diverges(kept[i], texts[i].answer, k, [token, *tokens])
            for (i, k, token), tokens in zip(starts, continued, strict=True)
        ]
        return labels.divergent(len(small), index, verdicts)

    def diverges(self, example: int, answer: list[int], start: int, other: list[int]) -> bool:
        """Whether `other`, written from position `start` on, leads to another answer, or says something else."""
        right = self.verdict(example, [*answer[:start], *other])
        if right is not None:
            return not right
        mine = labels.until(answer[start:], self.sentence_ends, self.task.sentence)
        theirs = labels.until(other, self.sentence_ends, self.task.sentence)
        return not labels.same_sentence(self.tokenizer.decode(mine), self.tokenizer.decode(theirs))

    def sufficient(
        self,
        kept: list[int],
        texts: list[Text],
        places: list[tuple[int, int]],
        small: Tensor,
        large: Tensor,
        target: Tensor,
    ) -> Tensor:
        """CITER's labels [T]: where both models leave the text, the small one goes on alone from there."""
        index = labels.undecided(small, large, target)
        verdicts: list[bool | None] = [None] * len(index)
        if self.task.checker is not None:
            starts = [places[row] for row in index.tolist()]
            prefixes = [[*texts[i].prompt, *texts[i].answer[:k]] for i, k in starts]
            continued = self.decode(self.pair.small, prefixes, "roll-outs of the small model")
            verdicts = [
                self.verdict(kept[i], [*texts[i].answer[:k], *tokens])
                for (i, k), tokens in zip(starts, continued, strict=True)
            ]
        return labels.sufficient(small, target, index, verdicts)

    def decode(
        self,
        folder: Path,
        prefixes: Sequence[Sequence[int]],
        title: str,
        max_tokens: int | None = None,
        ends: frozenset[int] | None = None,
    ) -> list[list[int]]:
        """Greedy continuations of all prefixes by the model in a folder, the end id included."""
        with engine_of(folder, self.pair) as engine, counted(title, len(prefixes)) as advance:
            return greedy(
                engine,
                prefixes,
                max_tokens=max_tokens or self.task.max_tokens,
                end_ids=ends or self.ends,
                progress=advance,
            )

    def prefill(self, folder: Path, texts: Sequence[Text], top: int, title: str) -> features.Features:
        """What the model in a folder gives at every position of the answers."""
        with model_of(folder, self.pair) as model, counted(title, len(texts)) as advance:
            return features.read(model, texts, top, advance)
