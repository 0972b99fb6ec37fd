"""The client side of a model: Triton requests in, responses out. The entry model and every subserver have one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenrouter.assembly import Entry
from tokenrouter.channel.unix import UnixCarrier, runtime_dir, socket_path
from tokenrouter.errors import InvalidRequest, RouterError
from tokenrouter.loops import OrchestratorLoop
from tokenrouter.orchestrator.machine import Orchestrator
from tokenrouter.pulse import Pulse
from tokenrouter.triton.replies import TritonReply
from tokenrouter.triton.responder import Responder
from tokenrouter.triton.tensors import Input, read_inputs, read_timeout_us

# How long Triton may take to accept the last answers of a process that ends itself.
_ANSWER_S = 5.0


class Frontend:
    """Validates requests on Triton's thread and hands them to an orchestrator loop, which it starts.

    Args:
        entry: tokenizer, request builder and settings.
        orchestrator: of this entry.
        name: the model's name, told to subservers.
        share: KV share, ``routed`` or ``direct``.
        inputs: declared inputs.
        outputs: names of the declared outputs.
        changed: told in the loop's thread whenever statistics may have changed.
        broke: told in the loop's thread when an exception has ended it and its requests have been answered.
    """

    def __init__(
        self,
        entry: Entry,
        orchestrator: Orchestrator,
        *,
        name: str,
        share: str,
        inputs: Mapping[str, Input],
        outputs: frozenset[str],
        changed: Callable[[], None] = lambda: None,
        broke: Callable[[], None] = lambda: None,
    ) -> None:
        self._entry = entry
        self._inputs = inputs
        self._outputs = outputs
        directory = runtime_dir()
        carrier = UnixCarrier(dial={model: socket_path(directory, model) for model in entry.config.models})
        self._broke = broke
        self._loop = OrchestratorLoop(
            orchestrator, carrier, hello=entry.hello(name, share), changed=changed, broke=self._loop_broke
        )
        self._responder: Responder[TritonReply] = Responder(name, self._loop.cancel)
        self._loop.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Takes requests; never blocks."""
        arrived_ns = time.monotonic_ns()
        for request in requests:
            self._take(request, arrived_ns)

    def _take(self, request: Any, arrived_ns: int) -> None:
        reply = TritonReply(request, self._outputs, self._responder)
        try:
            timeout_us = read_timeout_us(request.parameters(), self._inputs) or int(request.timeout())
            tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            builder = self._entry.builder
            fields, call = read_inputs(tensors, self._inputs, builder.limits, builder.defaults)
            built = builder.build(fields, timeout_ns=self._timeout_ns(timeout_us))
        except RouterError as exc:
            self._loop.refuse(reply, exc)
        except Exception as exc:
            self._loop.refuse(reply, InvalidRequest(f"the request cannot be read: {type(exc).__name__}: {exc}"))
        else:
            reply.accept(call, stream=built.stream, prompt=built.prompt, prompt_tokens=len(built.tokens))
            self._responder.watch(reply)
            self._loop.submit(built, reply, arrived_ns=arrived_ns)

    def _timeout_ns(self, timeout_us: int) -> int | None:
        if not timeout_us:
            return None
        if not self._entry.config.queue.allow_timeout_override:
            raise InvalidRequest(
                f"timeout is {timeout_us} microseconds, but this deployment sets its own: leave it out, or set the "
                "model's parameter allow_timeout_override to true"
            )
        return self._entry.builder.limits.timeout_ns(timeout_us)

    @property
    def pulse(self) -> Pulse:
        """Of the loop."""
        return self._loop.pulse

    def stop_at(self, at_ns: int) -> None:
        """All responses have to end by then (`time.monotonic_ns`)."""
        self._loop.stop_at(at_ns)

    def _loop_broke(self) -> None:
        self._responder.stop(within_s=_ANSWER_S)
        self._broke()

    def stop(self, *, within_s: float | None = None) -> None:
        """Ends the loop; requests that still run are told so, within a time if Triton may not listen any more."""
        self._loop.stop()
        self._responder.stop(within_s=within_s)
