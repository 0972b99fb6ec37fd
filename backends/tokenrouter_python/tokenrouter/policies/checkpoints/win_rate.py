"""Win-rate estimators of query-level routing, read from files. Only `bert` needs torch.

Our classifier is a bag of hashed words: text is lower-cased and split into words and single other characters; each word
and each pair of neighbours is hashed (CRC-32, modulo the number of buckets) to a row of ``embedding.weight`` [N, D];
w = sigmoid(``output.weight`` [1, D] . mean of the rows + ``output.bias`` [1]). `args` of its file: none.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from tokenrouter.errors import ConfigError
from tokenrouter.policies.checkpoints.native import load_router

# More than this of a prompt is not looked at by patterns and words.
MAX_CHARACTERS = 20_000
_WORD = re.compile(r"\w+|[^\w\s]")


class WinRate(Protocol):
    """Estimates how likely the large model's answer is the better one."""

    @property
    def threshold(self) -> float | None:
        """Stored in the file, or None."""
        ...

    def __call__(self, text: str) -> float:
        """The win rate, in [0, 1], for a message."""
        ...


class Patterns:
    """w = 1 if any pattern is found in the text, else 0.

    Args:
        path: text file, one regular expression a line; blank lines and lines that begin with ``#`` are skipped.

    Raises:
        ConfigError: no pattern, or one that is no regular expression.
    """

    threshold: float | None = None

    def __init__(self, path: Path) -> None:
        try:
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip() and line[0] != "#"]
            self._patterns = [re.compile(line) for line in lines]
        except (OSError, UnicodeDecodeError, re.error) as exc:
            raise ConfigError(f"{path} is no file of regular expressions: {exc}") from exc
        if not self._patterns:
            raise ConfigError(f"{path} holds no pattern; write one regular expression a line")

    def __call__(self, text: str) -> float:
        """1.0 or 0.0."""
        return float(any(pattern.search(text[:MAX_CHARACTERS]) for pattern in self._patterns))


def word_buckets(text: str, buckets: int) -> list[int]:
    """Rows of the embedding that a text averages; words first, then pairs. Empty for a text without words."""
    words = _WORD.findall(text[:MAX_CHARACTERS].lower())
    pairs = [f"{left} {right}" for left, right in pairwise(words)]
    return [zlib.crc32(feature.encode()) % buckets for feature in (*words, *pairs)]


class Classifier:
    """Our bag-of-words classifier; see the module's text.

    Args:
        path: file of kind ``query_level``.

    Raises:
        ConfigError: see `native.load_router`; or a tensor is missing or has another shape.
    """

    def __init__(self, path: Path) -> None:
        router = load_router(path, "query_level", framework="np")
        self.threshold = router.threshold
        self._embedding = _array(router.tensors, "embedding.weight", (None, None), router.origin)
        width = self._embedding.shape[1]
        self._weight = _array(router.tensors, "output.weight", (1, width), router.origin)[0]
        self._bias = float(_array(router.tensors, "output.bias", (1,), router.origin)[0])

    def __call__(self, text: str) -> float:
        """The win rate, in (0, 1)."""
        rows = word_buckets(text, len(self._embedding))
        z = self._bias + (float(self._embedding[rows].mean(0) @ self._weight) if rows else 0.0)
        return 0.5 * (1.0 + math.tanh(0.5 * z))


def _array(
    tensors: Mapping[str, Any], name: str, shape: tuple[int | None, ...], origin: str
) -> npt.NDArray[np.float32]:
    found = tensors.get(name)
    if found is None:
        raise ConfigError(f"{origin}: tensor {name!r} is missing; the file has {', '.join(sorted(tensors))}")
    fits = len(found.shape) == len(shape) and all(
        size is None or size == actual for size, actual in zip(shape, found.shape, strict=True)
    )
    if not fits or 0 in found.shape:
        expected = ", ".join("*" if size is None else str(size) for size in shape)
        raise ConfigError(f"{origin}: tensor {name!r} has shape {list(found.shape)}; expected [{expected}]")
    return np.asarray(found, dtype=np.float32)


class Bert:
    """RouteLLM's ``bert`` router: a 3-class sequence classifier; w is the probability of class 0.

    Classes 1 and 2 are a tie and a win of the small model. Source: lm-sys/RouteLLM, routellm/routers/routers.py.

    Args:
        folder: Hugging Face folder with model and tokenizer.

    Raises:
        ConfigError: transformers is not installed, the folder cannot be loaded, or has not 3 classes.
    """

    threshold: float | None = None

    def __init__(self, folder: Path) -> None:
        try:
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        except ImportError as exc:
            raise ConfigError(f"router 'bert' needs the packages torch and transformers: {exc}") from exc
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model = AutoModelForSequenceClassification.from_pretrained(folder, local_files_only=True).eval()
        except Exception as exc:
            raise ConfigError(f"{folder} cannot be loaded as a sequence classifier: {exc}") from exc
        if self._model.config.num_labels != 3:
            raise ConfigError(
                f"{folder} has {self._model.config.num_labels} classes; expected 3 (large wins, tie, small wins)"
            )
        positions = getattr(self._model.config, "max_position_embeddings", 512)
        self._max_length = min(self._tokenizer.model_max_length, positions)

    def __call__(self, text: str) -> float:
        """The win rate 1 - (p1 + p2), in double precision."""
        import torch

        inputs = self._tokenizer(text, return_tensors="pt", truncation=True, max_length=self._max_length)
        with torch.inference_mode():
            logits = self._model(**inputs).logits[0].double()
        return win_rate(logits.tolist())


def win_rate(logits: list[float]) -> float:
    """1 - (softmax class 1 + softmax class 2) of three class logits."""
    weights = [math.exp(logit - max(logits)) for logit in logits]
    return 1.0 - (weights[1] + weights[2]) / sum(weights)


LOADERS: Mapping[str, Callable[[Path, str], WinRate]] = MappingProxyType(
    {
        "regex": lambda path, device: Patterns(path),
        "classifier": lambda path, device: Classifier(path),
        "bert": lambda path, device: Bert(path),
    }
)
