"""Turns updates into Triton responses."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import triton_python_backend_utils as pb_utils

from tokenrouter.errors import RouterError
from tokenrouter.response import Result, Run, Update
from tokenrouter.triton.inputs import CallFields
from tokenrouter.triton.paths import without_paths
from tokenrouter.triton.responder import Responder
from tokenrouter.triton.tensors import MAPPED_OUTPUTS

Prompt = TypeVar("Prompt", str, Sequence[int])


def triton_error(error: RouterError, root: Path, *, say_code: bool = False) -> Any:
    """The error as Triton's own type, with its code. Of the repository in `root` it names no absolute paths.

    Args:
        say_code: the text begins with the code in brackets too, because Triton's streams lose it.
    """
    code = getattr(pb_utils.TritonError, error.code, pb_utils.TritonError.INTERNAL)
    text = without_paths(str(error), root)
    return pb_utils.TritonError(f"[{error.code}] {text}" if say_code else text, code)


class TritonReply:
    """Answers one Triton request: any number of responses, then exactly one FINAL flag.

    Args:
        request: Triton's request.
        outputs: names of the output tensors that the model declares.
        responder: the thread that sends.
        root: of the model repository.
        decoupled: whether the FINAL flag comes by itself, after any number of responses; else with the only one.

    Attributes:
        errors_have_codes: see `triton_error`.
    """

    def __init__(
        self, request: Any, outputs: frozenset[str], responder: Responder[TritonReply], *, root: Path, decoupled: bool
    ) -> None:
        self._root = root
        self._responder = responder
        self._decoupled = decoupled
        self._sender = request.get_response_sender()
        self._wanted = frozenset(request.requested_output_names()) & outputs
        if not self._wanted or self._wanted == outputs:  # no names were named
            self._wanted = outputs - MAPPED_OUTPUTS.keys()
        self._call = CallFields()
        self._stream = False
        self._prompt = ""
        self._prompt_ids: Sequence[int] = ()
        self._stopped = False
        self.errors_have_codes = False
        # Clients read wall-clock times; the core knows only the monotonic clock.
        self._epoch_ns = time.time_ns() - time.monotonic_ns()

    def accept(self, call: CallFields, *, stream: bool, prompt: str, prompt_ids: Sequence[int]) -> None:
        """The request is valid: how it wants to be answered."""
        self._call = call
        self._stream = stream
        self._prompt = prompt
        self._prompt_ids = prompt_ids

    def stop(self) -> None:
        """A `stop` request named this one, or this is one: a decoupled answer ends without an error."""
        self._stopped = True

    def cancelled(self) -> bool:
        return bool(self._sender.is_cancelled())

    def update(self, update: Update) -> None:
        """Hands what is new to the responder."""
        self._responder.put(self, update)

    def tell(self, text: str) -> None:
        """Answers a call that asks for no tokens, with its only response; from any thread, blocks."""
        response = pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("text_output", _strings([text]))])
        self._sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def send(self, update: Update) -> None:
        """Sends what is new; called by the responder."""
        final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
        closes = update.result is not None and (not self._decoupled or "is_last" in self._wanted)
        if update.tokens or update.result is not None:
            last = final if closes else 0
            self._sender.send(pb_utils.InferenceResponse(output_tensors=self._tensors(update)), flags=last)
        if update.error is not None and not (self._stopped and self._decoupled):
            error = triton_error(update.error, self._root, say_code=self.errors_have_codes)
            self._sender.send(pb_utils.InferenceResponse(error=error), flags=final)
        elif update.final and not closes:
            self._sender.send(flags=final)
        if update.final:
            self._prompt = ""  # the responder keeps us for a while

    def _tensors(self, update: Update) -> list[Any]:
        values: dict[str, npt.NDArray[Any]] = {"text_output": _strings([self._front(self._prompt) + update.text])}
        if "output_ids" in self._wanted:
            values["output_ids"] = np.array(update.tokens, dtype=np.int32)
        if "output_ids_by_beam" in self._wanted:
            ids = np.array([*self._front(self._prompt_ids), *update.tokens], dtype=np.int32)
            values["output_ids_by_beam"] = ids[None, None]
            values["sequence_length"] = _scalar(len(ids), np.int32)
        if "is_last" in self._wanted:
            values["is_last"] = _scalar(update.final, np.bool_)
        if self._call.return_num_output_tokens:
            values["num_output_tokens"] = _scalar(len(update.tokens), np.int32)
        if self._call.return_num_input_tokens:
            values["num_input_tokens"] = _scalar(len(self._prompt_ids), np.int32)
        if update.log_probs:
            log_probs = np.array(update.log_probs, dtype=np.float32)
            values["output_log_probs"] = log_probs[None, None]
            values["cum_log_probs"] = log_probs.sum(keepdims=True)[None]
        if update.result is not None:
            values.update(self._last(update.result))
        if self._call.return_routing:
            values["routing"] = _strings([routing_json(update.runs, update.result)])
        return [pb_utils.Tensor(name, value) for name, value in values.items() if name in self._wanted]

    def _front(self, prompt: Prompt) -> Prompt:
        """What the response begins with: the prompt, or nothing of it."""
        return prompt[:0] if self._stream or self._call.exclude_input_in_output else prompt

    def _last(self, result: Result) -> dict[str, npt.NDArray[Any]]:
        """What only the last response carries."""
        values: dict[str, npt.NDArray[Any]] = {
            "finish_reason": _strings([result.finish_reason]),
            "batch_index": _scalar(0, np.int32),
            "sequence_index": _scalar(0, np.int32),
        }
        if result.log_probs:
            values["cum_log_probs"] = _scalar(sum(result.log_probs), np.float32)
        if self._call.return_perf_metrics:
            blocks = sum(result.kv_blocks.values())
            counts = {"kv_cache_alloc_new_blocks": blocks, "kv_cache_alloc_total_blocks": blocks}
            none = ("kv_cache_reused_blocks", "total_accepted_draft_tokens", "total_draft_tokens")
            values.update({name: _scalar(count, np.int32) for name, count in counts.items()})
            values.update({name: _scalar(0, np.int32) for name in none})
            values["acceptance_rate"] = _scalar(0.0, np.float32)
            values.update({name: _scalar(at + self._epoch_ns, np.int64) for name, at in _times(result).items()})
        return values


def _times(result: Result) -> dict[str, int]:
    return {
        "arrival_time_ns": result.arrived_ns,
        "first_scheduled_time_ns": result.started_ns,
        "first_token_time_ns": result.first_token_ns,
        "last_token_time_ns": result.last_token_ns,
    }


def routing_json(runs: Sequence[Run], result: Result | None) -> str:
    """Who wrote what: runs of this response, and with the last one the totals."""
    routing: dict[str, Any] = {"runs": [{"model": run.model, "start": run.start, "end": run.end} for run in runs]}
    if result is not None:
        routing.update(result.totals())
    return json.dumps(routing)


def _strings(values: Sequence[str]) -> npt.NDArray[Any]:
    return np.array([value.encode("utf-8", "replace") for value in values], dtype=np.object_)


def _scalar(value: float, dtype: Any) -> npt.NDArray[Any]:
    return np.array([[value]], dtype=dtype)
