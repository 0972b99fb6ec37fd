"""The external dispatcher: one asyncio process, one gRPC stream per model, one call per token."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any

import grpc
import msgspec
from tritonclient.grpc import service_pb2

from perf.baselines.standard.result import Response
from perf.baselines.standard.wire import CALL, IDS, Call, Reply
from tokenrouter.policies import PolicyCache
from tokenrouter.policies.base import EntryRequest
from tokenrouter.request import GenerationRequest

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
_PATIENCE_S = 60.0


class CallFailed(RuntimeError):
    """A model answered with an error, or did not answer."""


class _Active:
    __slots__ = ("fruitless", "ids", "model", "plan", "request", "response", "source", "state", "visit_tokens")

    def __init__(self, request: GenerationRequest, response: Response, model: str) -> None:
        self.request = request
        self.response = response
        self.ids = array("i", request.tokens)
        self.model = model
        self.source = ""
        self.visit_tokens = 0
        self.plan: tuple[int, str] | None = None
        self.state: dict[str, Any] = {}
        self.fruitless = 0


class _Lane:
    """The stream to one model. One write at a time is allowed on it, so a task of its own writes."""

    def __init__(self, channel: grpc.aio.Channel, model: str) -> None:
        self.call = channel.stream_stream(_METHOD)()
        self._outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        self._message = service_pb2.ModelInferRequest(model_name=model)
        for name, datatype in ((IDS, "INT32"), (CALL, "UINT8")):
            self._message.inputs.add(name=name, datatype=datatype, shape=(1, 0))
        self._message.raw_input_contents.extend((b"", b""))
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, active: _Active) -> None:
        """Makes a call: the whole history and what the policy needs."""
        request = active.request
        call = Call(
            len(request.tokens),
            request.sampling,
            request.policy,
            active.source,
            active.visit_tokens,
            active.plan,
            active.state,
        )
        message, payload = self._message, self._encoder.encode(call)
        message.id = str(active.response.index)
        message.inputs[0].shape[1] = len(active.ids)
        message.inputs[1].shape[1] = len(payload)
        message.raw_input_contents[0] = active.ids.tobytes()
        message.raw_input_contents[1] = payload
        self._outgoing.put_nowait(message.SerializeToString())

    async def write(self) -> None:
        """Sends what `send` made, until cancelled."""
        while True:
            await self.call.write(await self._outgoing.get())


class Dispatcher:
    """Routes requests token by token over the models of a server.

    Args:
        url: host:port of the gRPC endpoint.
        models: names.
        policies: the policies of this process; only their `entry` is asked here.
    """

    def __init__(self, url: str, models: Sequence[str], policies: PolicyCache) -> None:
        self._url = url
        self._models = tuple(models)
        self._policies = policies

    async def run(
        self, requests: Iterator[GenerationRequest], *, in_flight: int, seconds: float | None = None
    ) -> list[Response]:
        """Keeps `in_flight` requests running until there are no more, or the time is over.

        Raises:
            CallFailed: a model refused a call, or gave no answer for a minute.
        """
        async with grpc.aio.insecure_channel(self._url, options=_OPTIONS) as channel:
            loop = _Loop({name: _Lane(channel, name) for name in self._models}, requests, self._policies, seconds)
            return await loop.run(in_flight)


class _Loop:
    def __init__(
        self,
        lanes: Mapping[str, _Lane],
        requests: Iterator[GenerationRequest],
        policies: PolicyCache,
        seconds: float | None,
    ) -> None:
        self._lanes = lanes
        self._requests = requests
        self._policies = policies
        self._deadline = float("inf") if seconds is None else time.perf_counter() + seconds
        self._active: dict[str, _Active] = {}
        self._responses: list[Response] = []
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._over = asyncio.Event()

    async def run(self, in_flight: int) -> list[Response]:
        for _ in range(in_flight):
            self._start_next()
        tasks: list[Awaitable[None]] = [lane.write() for lane in self._lanes.values()]
        tasks += [self._read(name, lane) for name, lane in self._lanes.items()]
        running = [asyncio.ensure_future(task) for task in (*tasks, self._watch())]
        try:
            done, _ = await asyncio.wait(
                [*running, over := asyncio.ensure_future(self._over.wait())], return_when=asyncio.FIRST_COMPLETED
            )
            for task in done - {over}:
                task.result()
        finally:
            for task in (*running, over):
                task.cancel()
            await asyncio.gather(*running, over, return_exceptions=True)
            for lane in self._lanes.values():
                lane.call.cancel()
        return self._responses

    def _start_next(self) -> None:
        request = next(self._requests, None) if time.perf_counter() < self._deadline else None
        if request is None:
            if not self._active:
                self._over.set()
            return
        seed = request.sampling.seed
        response = Response(index=len(self._responses))
        policy = self._policies.get(request.policy)
        active = _Active(request, response, policy.entry(EntryRequest(request.prompt, request.tokens, seed)))
        self._responses.append(response)
        self._active[str(response.index)] = active
        self._lanes[active.model].send(active)

    async def _read(self, model: str, lane: _Lane) -> None:
        parse = service_pb2.ModelStreamInferResponse.FromString
        while (payload := await lane.call.read()) is not grpc.aio.EOF:
            answer = parse(payload)
            if answer.error_message:
                raise CallFailed(f"model {model!r}: {answer.error_message}")
            inferred = answer.infer_response
            self._apply(self._active[inferred.id], self._decoder.decode(inferred.raw_output_contents[0]))
        raise CallFailed(f"the stream to model {model!r} ended: {await lane.call.details()}")

    def _apply(self, active: _Active, reply: Reply) -> None:
        """Commits the token and makes the next call, or ends the response."""
        response, now = active.response, time.perf_counter()
        response.calls += 1
        response.ran[active.model] = response.ran.get(active.model, 0) + reply.ran
        if reply.keep and now < self._deadline:
            active.fruitless = 0
            active.ids.append(reply.token)
            response.ids.append(reply.token)
            response.writers.append(active.model)
            response.add(1, now)
            response.finish_reason = _finish_reason(active)
        if response.finish_reason or now >= self._deadline:
            del self._active[str(response.index)]
            self._start_next()
        else:
            self._go_on(active, reply)

    def _go_on(self, active: _Active, reply: Reply) -> None:
        active.state = reply.state
        if reply.target == active.model:
            active.visit_tokens += 1
            active.plan = reply.plan
        else:
            active.fruitless += 1
            if active.fruitless > len(self._lanes):
                raise CallFailed(f"policy {active.request.policy.name!r}: {active.fruitless} hand-offs without a token")
            active.response.handoffs += 1
            active.source, active.model = active.model, reply.target
            active.visit_tokens, active.plan = 0, None
        self._lanes[active.model].send(active)

    async def _watch(self) -> None:
        """Fails when nothing comes any more."""
        before = -1
        while (calls := sum(response.calls for response in self._responses)) != before:
            before = calls
            await asyncio.sleep(_PATIENCE_S)
        raise CallFailed(f"no answer for {_PATIENCE_S:g} s")


def _finish_reason(active: _Active) -> str:
    sampling, tokens = active.request.sampling, active.response.ids
    if tokens[-1] in sampling.end_ids:
        return "stop"
    return "length" if len(tokens) >= sampling.max_tokens else ""
