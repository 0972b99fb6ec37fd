"""A scheduler as a Triton model of the plain Python backend: three threads, so that nothing waits for Triton.

Triton's thread takes calls, one thread steps, one sends answers: the next step starts while the last one's answers are
on their way, and calls come in while it runs.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import triton_python_backend_utils as pb_utils

from perf.baselines.standard.paged import load_paged
from perf.baselines.standard.scheduler import Arrival, Scheduler
from perf.baselines.standard.wire import CALL, IDS, REPLY, Call, Reply
from tokenrouter.checkpoint import load_tokenizer
from tokenrouter.policies import PolicyCache
from tokenrouter.policies.base import PolicyContext
from tokenrouter.repository import Repository
from tokenrouter.triton.orphan import leave_with_parent

# As in TokenRouter's own processes.
_SWITCH_INTERVAL_S = 1e-4
_JOIN_S = 10.0


class TritonPythonModel:
    def initialize(self, args: Mapping[str, str]) -> None:
        leave_with_parent()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        logging.basicConfig(level=logging.INFO)
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        self._scheduler = load_scheduler(config["name"], Path(parameters["deployment"]), parameters["entry"])
        self._delay_s = float(parameters["delay_ms"]) * 1e-3
        self._decoder = msgspec.msgpack.Decoder(Call)
        self._ready = threading.Condition()
        self._arrivals: list[Arrival] = []
        self._stopped = False
        self._answers: queue.SimpleQueue[list[tuple[Any, Reply | Exception]] | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._step_loop, self._send_loop)]
        for thread in self._threads:
            thread.start()

    def execute(self, requests: Sequence[Any]) -> None:
        arrivals = [
            Arrival(
                _tensor(request, IDS).tobytes(),
                self._decoder.decode(_tensor(request, CALL).tobytes()),
                request.get_response_sender(),
            )
            for request in requests
        ]
        with self._ready:
            self._arrivals += arrivals
            self._ready.notify()

    def finalize(self) -> None:
        with self._ready:
            self._stopped = True
            self._ready.notify()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def _step_loop(self) -> None:
        scheduler = self._scheduler
        while self._wait():
            answers = scheduler.step()
            if answers:
                self._answers.put(answers)
            scheduler.tidy()
        self._answers.put(None)

    def _wait(self) -> bool:
        """Hands what came to the scheduler, once there is something to step; false at the end."""
        with self._ready:
            if not self._scheduler.busy:
                while not self._arrivals and not self._stopped:
                    self._ready.wait()
                self._linger()
            for arrival in self._arrivals:
                self._scheduler.add(arrival)
            self._arrivals.clear()
            return not self._stopped

    def _linger(self) -> None:
        """Lets further calls join the step, for at most the delay."""
        until = time.monotonic() + self._delay_s
        while not self._stopped and (left := until - time.monotonic()) > 0:
            self._ready.wait(left)

    def _send_loop(self) -> None:
        while (answers := self._answers.get()) is not None:
            for sender, answer in answers:
                sender.send(_response(answer), flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def load_scheduler(name: str, deployment: Path, entry: str) -> Scheduler:
    """The scheduler of one LLM of a TokenRouter model repository, with the same engine, options and routers.

    Args:
        name: the model.
        deployment: the model repository.
        entry: name of the entry model in it.
    """
    repository = Repository(deployment)
    routed = repository.entry(entry)
    configs = repository.models(routed)
    own = configs[name]
    sharing = sum(config.engine == own.engine for config in configs.values())
    engine = load_paged(own.engine, own.checkpoint, own.engine_options, sharing=sharing)
    context = PolicyContext(
        routed.models,
        str(deployment),
        tokenizer=load_tokenizer(own.checkpoint),
        hidden_size=engine.info.hidden_size,
        **engine.extras(name),
    )
    policies = PolicyCache(context)
    policies.get(routed.policy).prepare(name)
    return Scheduler(name, engine, policies)


def _tensor(request: Any, name: str) -> Any:
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy()


def _response(answer: Reply | Exception) -> Any:
    if isinstance(answer, Exception):
        return pb_utils.InferenceResponse([], pb_utils.TritonError(f"{type(answer).__name__}: {answer}"))
    payload = np.frombuffer(msgspec.msgpack.encode(answer), dtype=np.uint8)
    return pb_utils.InferenceResponse([pb_utils.Tensor(REPLY, payload[None])])
