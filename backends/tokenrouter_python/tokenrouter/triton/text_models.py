"""Text to token ids and back, for clients that call a chain of models as NVIDIA's `inflight_batcher_llm` is one.

`preprocessing` gives what `tensorrt_llm` takes, `postprocessing` the text of what that gives. Tensors and shapes are
NVIDIA's; a request may hold several prompts, one a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from tokenrouter.assembly import Entry
from tokenrouter.errors import InvalidRequest, RouterError
from tokenrouter.request import RequestFields
from tokenrouter.triton.inputs import text, word_ids
from tokenrouter.triton.replies import triton_error

Arrays = Mapping[str, npt.NDArray[Any]]
Work = Callable[[Entry, Arrays], Arrays]


class TextRole:
    """A model without state: every request is answered in the call that brings it.

    Args:
        work: input arrays to output arrays, batch dimension first.
        entry: the entry model's tokenizer, limits and end.
    """

    def __init__(self, work: Work, entry: Entry) -> None:
        self._work = work
        self._entry = entry

    def execute(self, requests: Sequence[Any]) -> None:
        for request in requests:
            response = self._response({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
            request.get_response_sender().send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finalize(self) -> None:
        """There is nothing to end."""

    def _response(self, inputs: Arrays) -> Any:
        try:
            outputs = self._work(self._entry, inputs)
        except RouterError as exc:
            return pb_utils.InferenceResponse(error=triton_error(exc, self._entry.root))
        except Exception as exc:
            error = InvalidRequest(f"the request cannot be read: {type(exc).__name__}: {exc}")
            return pb_utils.InferenceResponse(error=triton_error(error, self._entry.root))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outputs.items()])


def preprocess(entry: Entry, inputs: Arrays) -> Arrays:
    """Prompts [B, 1] to ids [B, L], padded at the end.

    Raises:
        InvalidRequest: a prompt is missing, or none that the entry model would take.
    """
    query = _needed(inputs, "QUERY")
    rows = len(query)
    end = inputs.get("END_ID", _column(rows, entry.builder.end_ids[0] if entry.builder.end_ids else -1))
    pad = inputs.get("PAD_ID", np.maximum(end, 0))
    built = [
        entry.builder.build(RequestFields(text_input=text("QUERY", row[0]), max_tokens=1, bad_words=bad))
        for row, bad in zip(query, _words(inputs, "BAD_WORDS_DICT", rows), strict=True)
    ]
    stop = [
        [entry.tokenizer.encode(word, add_special_tokens=False).ids for word in words if word]
        for words in _words(inputs, "STOP_WORDS_DICT", rows)
    ]
    return {
        "INPUT_ID": _padded([request.tokens for request in built], pad),
        "REQUEST_INPUT_LEN": np.array([[len(request.tokens)] for request in built], np.int32),
        "DECODER_INPUT_ID": _column(rows, 0),
        "REQUEST_DECODER_INPUT_LEN": _column(rows, 1),
        "BAD_WORDS_IDS": _stacked([word_ids(request.sampling.bad_words) for request in built]),
        "STOP_WORDS_IDS": _stacked([word_ids(words) for words in stop]),
        "REQUEST_OUTPUT_LEN": _needed(inputs, "REQUEST_OUTPUT_LEN"),
        "OUT_END_ID": end,
        "OUT_PAD_ID": pad,
    }


def postprocess(entry: Entry, inputs: Arrays) -> Arrays:
    """Ids [B, beams, L] and how many of each row count [B, beams] to text [B x beams], special tokens left out.

    Raises:
        InvalidRequest: a tensor is missing, or an id is none of the tokenizer's.
    """
    tokens, lengths = _needed(inputs, "TOKENS_BATCH"), _needed(inputs, "SEQUENCE_LENGTH")
    rows = [row[: max(0, int(n))] for row, n in zip(_flat(tokens), lengths.reshape(-1), strict=False)]
    most = entry.builder.vocab_size - 1
    for row in rows:
        if row.size and not 0 <= row.min() <= row.max() <= most:
            raise InvalidRequest(f"TOKENS_BATCH holds {row.min()}..{row.max()}; token ids lie in 0..{most}")
    texts = entry.tokenizer.decode_batch([row.tolist() for row in rows], skip_special_tokens=True)
    return {"OUTPUT": np.array([text.encode() for text in texts], dtype=np.object_)}


WORKS: Mapping[str, Work] = {"preprocessing": preprocess, "postprocessing": postprocess}
"""By the role that config.pbtxt names."""


def _needed(inputs: Arrays, name: str) -> npt.NDArray[Any]:
    if name not in inputs:
        raise InvalidRequest(f"{name} is missing; send it")
    return inputs[name]


def _words(inputs: Arrays, name: str, rows: int) -> list[list[str]]:
    """The words of every row; none of a tensor that is not sent."""
    return [[text(name, word) for word in row] for row in inputs[name]] if name in inputs else [[]] * rows


def _column(rows: int, value: int) -> npt.NDArray[np.int32]:
    return np.full((rows, 1), value, np.int32)


def _padded(rows: Sequence[Sequence[int]], pad: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
    longest = max(map(len, rows))
    return np.array(
        [[*row, *[int(fill)] * (longest - len(row))] for row, fill in zip(rows, pad[:, 0], strict=True)], np.int32
    )


def _stacked(words: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    """[B, 2, n]; what is missing in a row reads as no further word."""
    longest = max(row.shape[1] for row in words)
    return np.stack([np.pad(row, ((0, 0), (0, longest - row.shape[1])), constant_values=-1) for row in words])


def _flat(tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return tokens.reshape(-1, tokens.shape[-1])
