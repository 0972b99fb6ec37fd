"""Requests whose tokens noise and chance decide: one token lost or repeated shows in all that follow."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.grpc_calls import GrpcStream, Message
from tests.support.waiting import PATIENCE_S, until
from tokenrouter.offline import TokenRouter
from tools.tritonserver.server import TritonServer

# The noise decides among tokens, and chance decides who writes.
_SAMPLING = {"policy": "random", "policy_params": json.dumps({"p": 0.5}), "temperature": 3.0}


@dataclass(frozen=True)
class Drawn:
    """Requests by seed.

    Attributes:
        count: how many.
        tokens: of each.
    """

    count: int
    tokens: int

    def fields(self, seed: int) -> dict[str, Any]:
        """What a client sends."""
        return {"text_input": _prompt(seed), **self._sampling(seed), "stream": True}

    def expected(self, repository: Path) -> list[list[int]]:
        """Tokens of one process without any channel."""
        with TokenRouter.from_repository(repository, entry="tokenrouter") as router:
            return [router.generate([_prompt(seed)], **self._sampling(seed))[0].tokens for seed in range(self.count)]

    @contextmanager
    def running(
        self, server: TritonServer, *, model: str = "tokenrouter", only: Sequence[int] | None = None
    ) -> Iterator[Callable[[], list[list[int]]]]:
        """Requests that have begun; the function waits for their tokens."""
        seeds = range(self.count) if only is None else only
        with GrpcStream(server) as call:
            for seed in seeds:
                call.send(self.fields(seed), model=model, request_id=f"{seed}")
            until(lambda: all(call.of(f"{seed}") for seed in seeds), what="all have begun")
            yield lambda: [ids(call.wait(f"{seed}", within_s=3 * PATIENCE_S)) for seed in seeds]

    def _sampling(self, seed: int) -> dict[str, Any]:
        return {"max_tokens": self.tokens, "min_tokens": self.tokens, "seed": seed, **_SAMPLING}


def _prompt(seed: int) -> str:
    return f"request {seed} "


def ids(messages: list[Message]) -> list[int]:
    """Tokens of a request that must have succeeded."""
    assert not any(message.error for message in messages), messages[-1]
    return [token for message in messages for token in message.ids]
