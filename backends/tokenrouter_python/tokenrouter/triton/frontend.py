"""The client side of a model: Triton requests in, responses out. The entry model and every subserver have one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import numpy.typing as npt

from tokenrouter import telemetry
from tokenrouter.assembly import Entry
from tokenrouter.channel.ends import dialling
from tokenrouter.channel.unix import runtime_dir
from tokenrouter.errors import InvalidRequest, RequestCancelled, RouterError, contained
from tokenrouter.loops.orchestrating import OrchestratorLoop
from tokenrouter.orchestrator.machine import Orchestrator
from tokenrouter.pulse import Pulse
from tokenrouter.request import GenerationRequest
from tokenrouter.response import Update
from tokenrouter.triton.inputs import CallParameters, check_sizes, read_inputs, read_parameters, size_of
from tokenrouter.triton.reading import SMALL_BYTES, ReadingPool
from tokenrouter.triton.recorder import Recorder
from tokenrouter.triton.replies import TritonReply
from tokenrouter.triton.responder import Responder
from tokenrouter.triton.tensors import Input

if TYPE_CHECKING:
    from tokenrouter.subserver.machine import Subserver

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Call:
    """One request of Triton's: whom to answer, its id, when it came, its own time-out, and its caller's span."""

    reply: TritonReply
    request_id: str
    arrived_ns: int
    timeout_us: int
    trace: Any = None


# How long Triton may take to accept the last answers of a process that ends itself.
_ANSWER_S = 5.0


class Frontend:
    """Validates requests, the small ones on Triton's thread, and hands them to an orchestrator loop, which it starts.

    Args:
        entry: tokenizer, request builder and settings.
        orchestrator: of this entry.
        name: the model's name, told to subservers.
        share: KV share, ``routed`` or ``direct``.
        inputs: declared inputs.
        outputs: names of the declared outputs.
        decoupled: whether requests may stream.
        changed: told in the loop's thread whenever statistics may have changed.
        broke: told in the loop's thread when an exception has ended it and its requests have been answered.
        subserver: whose steps are recorded too, or None.
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
        decoupled: bool,
        changed: Callable[[], None] = lambda: None,
        broke: Callable[[], None] = lambda: None,
        subserver: Subserver | None = None,
    ) -> None:
        self._entry = entry
        self._decoupled = decoupled
        self._by_id: WeakValueDictionary[str, TritonReply] = WeakValueDictionary()
        self._inputs = inputs
        self._outputs = outputs
        config = entry.config
        replicas = [each for names in config.all_replicas.values() for each in names]
        carrier = dialling(
            name,
            {each: config.hosts.get(each) for each in replicas},
            runtime_dir(),
            tls=config.tls,
            repository=entry.digest,
        )
        self._broke = broke
        self._loop = OrchestratorLoop(
            orchestrator, carrier, hello=entry.hello(name, share), changed=changed, broke=self._loop_broke
        )
        self._orchestrator = orchestrator
        self._reading = ReadingPool(name)
        self._responder: Responder[TritonReply] = Responder(name, self._loop.cancel)
        self._recorder = Recorder(name, self._loop, subserver)
        self._telemetry = telemetry.from_environment(name)
        if self._telemetry is not None:
            orchestrator.trails.traced = self._telemetry.export
        self._loop.start()

    def execute(self, requests: Sequence[Any]) -> None:
        """Takes requests; never blocks for long."""
        arrived_ns = time.monotonic_ns()
        for request in requests:
            reply = TritonReply(
                request, self._outputs, self._responder, root=self._entry.root, decoupled=self._decoupled
            )
            with self._told(reply):
                self._take(request, reply, arrived_ns)

    def _take(self, request: Any, reply: TritonReply, arrived_ns: int) -> None:
        parameters = read_parameters(request.parameters(), self._inputs)
        reply.errors_have_codes = parameters.return_error_code
        if parameters.timeline_ms is not None:
            self._recorder.start(reply, parameters.timeline_ms)
            return
        timeout_us = parameters.timeout_us or int(request.timeout())
        call = _Call(reply, request.request_id(), arrived_ns, timeout_us, self._caller(parameters))
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        size = size_of(tensors)
        if size <= SMALL_BYTES:
            self._read(call, tensors)
            return
        check_sizes(tensors, self._inputs, self._entry.builder.limits)
        if "input_ids" in tensors and "input_lengths" not in tensors:  # without them all ids are the prompt
            self._orchestrator.check_length(tensors["input_ids"].shape[-1])
        # Numbers lie in memory that Triton takes back when this thread returns to it.
        tensors = {name: array if array.dtype == np.object_ else array.copy() for name, array in tensors.items()}
        self._later(call, size, partial(self._read, call, tensors))

    def _caller(self, parameters: CallParameters) -> Any:
        """The span for which the request's own are exported, or None."""
        if self._telemetry is None or not parameters.traceparent:
            return None
        return self._telemetry.caller(parameters.traceparent, parameters.tracestate)

    def _read(self, call: _Call, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
        """From tensors to a request; one whose policy has to be loaded waits for that elsewhere."""
        builder = self._entry.builder
        fields, form = read_inputs(tensors, self._inputs, builder.limits, builder.defaults)
        if form.stop:
            self._stop(call)
            return
        if fields.stream and not self._decoupled:
            raise InvalidRequest("stream is true, but this model is not decoupled and gives one response: leave it out")
        if fields.explain:  # the routing says it
            form = replace(form, return_routing=True)
        timeout_ns = self._timeout_ns(call.timeout_us, fields.priority)
        built = builder.build(fields, timeout_ns=timeout_ns, check_length=self._orchestrator.check_length)
        if call.trace is not None:
            built = replace(built, trace=call.trace)
        call.reply.accept(form, stream=built.stream, prompt=built.prompt, prompt_ids=built.tokens)
        self._by_id[call.request_id] = call.reply
        if self._orchestrator.knows(built.policy):
            self._submit(call, built)
        else:
            self._later(call, len(built.policy.params), partial(self._submit, call, built))

    def _submit(self, call: _Call, built: GenerationRequest) -> None:
        """Hands it over. The policy decides here who writes first, which may run a model."""
        route = self._orchestrator.route(built)
        self._responder.watch(call.reply)
        self._loop.submit(built, call.reply, arrived_ns=call.arrived_ns, route=route)

    def _later(self, call: _Call, size: int, work: Callable[[], None]) -> None:
        def job() -> None:
            with self._told(call.reply):
                work()

        self._reading.put(job, size, refuse=partial(self._loop.refuse, call.reply))

    @contextmanager
    def _told(self, reply: TritonReply) -> Iterator[None]:
        """Whatever is raised is told to the one request that it is about."""
        try:
            yield
        except RouterError as exc:
            self._loop.refuse(reply, exc)
        except BaseException as exc:
            error = contained(exc)
            log.exception("a request cannot be read")
            self._loop.refuse(reply, InvalidRequest(f"the request cannot be read: {type(error).__name__}: {error}"))

    def _stop(self, call: _Call) -> None:
        """NVIDIA's clients end a request by another one with its id: both are told that it was cancelled."""
        running = self._by_id.get(call.request_id) if call.request_id else None
        if running is not None:
            running.stop()
            self._loop.cancel(running)
        call.reply.stop()
        call.reply.update(Update(0, error=RequestCancelled("the client stopped the request")))

    def _timeout_ns(self, timeout_us: int, priority: int | None) -> int | None:
        """The request's own time-out, if it may have one at its level; None without."""
        if not timeout_us:
            return None
        config = self._entry.config
        level = config.priorities.level(priority)
        if not config.priorities.policies.get(level, config.queue).allow_timeout_override:
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
        self._recorder.stop()
        self._loop.stop_at(at_ns)

    def _loop_broke(self) -> None:
        self._responder.stop(within_s=_ANSWER_S)
        self._broke()

    def stop(self, *, within_s: float | None = None) -> None:
        """Ends the loop; requests that still run are told so, within a time if Triton may not listen any more."""
        self._reading.stop()
        self._recorder.stop()
        self._loop.stop()
        self._responder.stop(within_s=within_s)
        if self._telemetry is not None:
            self._telemetry.stop()
