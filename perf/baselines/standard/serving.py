"""The baseline as one object: a server from a TokenRouter deployment, and closed loops through its dispatcher."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from perf.baselines.standard.dispatcher import Dispatcher
from perf.baselines.standard.repository import write_standard_repository
from perf.baselines.standard.result import Run
from perf.serving.window import cpu_seconds
from tokenrouter.assembly import Entry
from tokenrouter.errors import InvalidRequest
from tokenrouter.policies import PolicyCache
from tokenrouter.policies.base import PolicyContext
from tokenrouter.repository import Repository
from tokenrouter.request import GenerationRequest, RequestFields
from tools.tritonserver.server import TritonServer

_ROOT = Path(__file__).resolve().parents[3]


class StandardServing:
    """A running server with one plain model per LLM, and the dispatcher that routes between them.

    Example::

        with StandardServing(repository) as serving:
            run = serving.run([RequestFields(text_input="start 12; +34", max_tokens=64, seed=1)], in_flight=1)
            print(run.responses[0].tokens, run.tokens_per_second)

    Args:
        deployment: model repository of TokenRouter; its engines, options, routers and default policy are used.
        entry: name of its entry model.
        delay_ms: how long a step that could start waits for further calls.
    """

    def __init__(self, deployment: str | Path, *, entry: str = "tokenrouter", delay_ms: float = 0.0) -> None:
        self.deployment = Path(deployment).resolve()
        source = Repository(deployment)
        config = source.entry(entry)
        self._entry = Entry(config, source)
        context = PolicyContext(config.models, str(self.deployment), tokenizer=self._entry.tokenizer)
        self._policies = PolicyCache(context)
        self._folder = tempfile.TemporaryDirectory(prefix="standard-serving-")
        repository = Path(self._folder.name)
        self.models = write_standard_repository(repository, self.deployment, entry=entry, delay_ms=delay_ms)
        search = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        self.server = TritonServer(repository, env={"PYTHONPATH": search})

    def run(self, requests: Iterable[RequestFields], *, in_flight: int, seconds: float | None = None) -> Run:
        """Keeps `in_flight` of the requests running, in order.

        Args:
            requests: may be endless if `seconds` is given. With equal prompts the prefix cache helps from the second
                on, as it should; for a measurement without that give different ones.
            in_flight: how many run at once.
            seconds: stop after this time; running responses stay unfinished.

        Raises:
            InvalidRequest: a request is invalid, or asks for what the baseline does not do.
            CallFailed: a model answered with an error.
        """
        dispatcher = Dispatcher(self.server.grpc_url, self.models, self._policies)
        before, started = cpu_seconds(self.server, own="dispatcher"), time.perf_counter()
        responses = asyncio.run(dispatcher.run(map(self._build, requests), in_flight=in_flight, seconds=seconds))
        ended, after = time.perf_counter(), cpu_seconds(self.server, own="dispatcher")
        return Run(
            responses,
            in_flight,
            started,
            ended if seconds is None else min(ended, started + seconds),
            {name: after[name] - cpu for name, cpu in before.items()},
        )

    def _build(self, fields: RequestFields) -> GenerationRequest:
        request = self._entry.builder.build(fields)
        if request.stop_words or request.sampling.log_probs:
            raise InvalidRequest("the standard-serving baseline has neither stop_words nor log_probs")
        return request

    def __enter__(self) -> StandardServing:
        self.server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.stop()
        self._folder.cleanup()
