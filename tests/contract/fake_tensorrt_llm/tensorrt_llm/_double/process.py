"""The loop in a process of its own: nothing but pickles crosses the border.

The worker imports what requests refer to from the same sys.path. Model classes registered with `register_auto_model`
are sent by reference, so their modules must be importable there.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from tensorrt_llm import _behaviour
from tensorrt_llm._torch.models.modeling_utils import MODEL_CLASS_MAPPING
from tensorrt_llm.executor.result import Response
from tokenrouter.engines.tensorrt_llm.facts import WORKER_COMMAND

START_SECONDS = 120.0
END_SECONDS = 20.0


class ProcessWorker:
    """Starts the process and talks to it. An empty list of responses means that it died."""

    def __init__(self, args: Any, post: Callable[[list[Response]], None]) -> None:
        self._post = post
        self._process, self._connection = _start()
        self._connection.send_bytes(pickle.dumps((args, MODEL_CLASS_MAPPING, _behaviour.broken_now())))
        try:
            error = pickle.loads(self._connection.recv_bytes())
        except EOFError:
            error = f"the worker process ended with status {self._process.wait()}"
        if error:
            self._process.wait(END_SECONDS)
            self._connection.close()
            raise RuntimeError(f"Executor worker returned error: {error}")
        self._reader = threading.Thread(target=self._read, name="fake-tensorrt-llm-results", daemon=True)
        self._reader.start()

    def put(self, item: Any) -> None:
        """Sends an item to the loop."""
        with contextlib.suppress(OSError):
            self._connection.send_bytes(item if isinstance(item, bytes) else pickle.dumps(item))

    def close(self) -> None:
        """Ends the process."""
        self.put(None)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._connection.close()

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._post(pickle.loads(self._connection.recv_bytes()))
        self._post([])
        self._process.wait()


def _start() -> tuple[subprocess.Popen[bytes], Connection[Any, Any]]:
    with (
        tempfile.TemporaryDirectory(prefix="fake-tensorrt-llm-") as folder,
        Listener(str(Path(folder) / "socket"), family="AF_UNIX") as listener,
    ):
        name = WORKER_COMMAND if _behaviour.true("workers_named") else "worker"
        code = "from tensorrt_llm._double.process import main; main()"
        command = [_python(), "-c", code, str(listener.address), f"{name}.server"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)
        listener._listener._socket.settimeout(1.0)  # type: ignore[attr-defined]
        deadline = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                return process, listener.accept()
        process.kill()
        raise RuntimeError(f"the worker process did not start; status {process.wait()}")


def _python() -> str:
    """An interpreter; inside Triton's stub sys.executable may be none."""
    for path in (sys.executable, f"{sys.prefix}/bin/python3", f"{sys.exec_prefix}/bin/python3"):
        if path and "python" in Path(path).name and os.access(path, os.X_OK):
            return path
    return "python3"


def main() -> None:
    """The worker process: builds the loop and runs it until the connection ends."""
    connection = Client(sys.argv[1], family="AF_UNIX")
    try:
        args, classes, broken = pickle.loads(connection.recv_bytes())
        from tensorrt_llm._double.loop import ThreadWorker

        MODEL_CLASS_MAPPING.update(classes)
        _behaviour.break_for_good(broken)
        sending = threading.Lock()

        def post(responses: list[Response]) -> None:
            with sending:
                connection.send_bytes(pickle.dumps(responses))

        worker = ThreadWorker(args, post)
    except Exception as exc:
        connection.send_bytes(pickle.dumps(f"{type(exc).__name__}: {exc}"))
        raise
    connection.send_bytes(pickle.dumps(None))
    with contextlib.suppress(EOFError, OSError):
        # Requests stay pickled until the loop takes them.
        while (item := _unpacked(connection.recv_bytes())) is not None:
            worker.put(item)
    worker.close()


def _unpacked(item: bytes) -> Any:
    small = pickle.loads(item) if len(item) < 64 else item
    return small if small is None or isinstance(small, int | str) else item
