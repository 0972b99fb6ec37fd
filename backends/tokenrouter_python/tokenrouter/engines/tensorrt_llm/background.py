"""An engine that lives in an asyncio loop of its own thread: KV ledger, news, and the way in and out of that thread."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

from tokenrouter.engines.base import EngineInfo, EngineStep, VisitNews
from tokenrouter.engines.tensorrt_llm.ledger import Lease, Ledger

T = TypeVar("T")


class BackgroundEngine:
    """What is the same for every library of this kind; the subclass is a `base.LoopEngine`.

    Args:
        info: facts about the engine.
    """

    def __init__(self, info: EngineInfo) -> None:
        self._info = info
        self._ledger = Ledger(info)
        self._news: deque[VisitNews] = deque()
        self._steps: deque[EngineStep] = deque()
        self._wake: Callable[[], None] = _nobody
        # A task that nobody refers to may be collected before it is done.
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{info.name}-engine", daemon=True)
        self._thread.start()

    @property
    def info(self) -> EngineInfo:
        """Facts about the engine; constant after construction."""
        return self._info

    def resize(self, blocks: int) -> None:
        """The pool has that many blocks; before anything is leased."""
        self._info = replace(self._info, kv_blocks=blocks)
        self._ledger = Ledger(self._info)

    @property
    def blocks_leased(self) -> int:
        """KV blocks leased to open sequences (reserved for their worst case)."""
        return self._ledger.leased

    @property
    def blocks_used(self) -> int:
        """KV blocks that open sequences should have in the cache."""
        return self._ledger.used

    def open(self, *, kv_tokens: int, prompt_tokens: int) -> Lease:
        """See `Ledger.open`."""
        return self._ledger.open(kv_tokens)

    def close(self, handle: Lease) -> None:
        """Gives the lease back; blocks stay in the cache until somebody needs the room."""
        self._ledger.close(handle)

    @property
    def has_news(self) -> bool:
        """Whether `collect` or `steps` has something."""
        return bool(self._news or self._steps)

    def collect(self) -> list[VisitNews]:
        """News since the last call."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def steps(self) -> list[EngineStep]:
        """See `LoopEngine.steps`."""
        return [self._steps.popleft() for _ in range(len(self._steps))]

    def listen(self, wake: Callable[[], None]) -> None:
        """See `LoopEngine.listen`."""
        self._wake = wake

    def tell(self, news: VisitNews) -> None:
        """Adds news; callable from any thread."""
        self._news.append(news)
        self._wake()

    def tell_step(self, step: EngineStep) -> None:
        """Adds a step of the engine's own loop; callable from any thread."""
        self._steps.append(step)
        self._wake()

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """Runs `function(*args)` in the loop, after everything that was asked for before."""
        self._loop.call_soon_threadsafe(function, *args)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a coroutine; to be called in the loop."""
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the loop and waits for it; to be called outside the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def beside(self, function: Callable[[], T]) -> T:
        """Runs a function that blocks in a thread beside the loop, and waits for it."""
        return self.wait_for(asyncio.to_thread(function))

    @property
    def alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Ends the loop. Repeating it is harmless."""
        if self.alive:
            self.call(self._stop)
            self._thread.join()
            self._loop.close()

    def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._loop.call_soon(self._loop.stop)


def _nobody() -> None:
    """Nobody listens yet."""
