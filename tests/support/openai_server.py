"""The OpenAI-compatible server in this process, in front of a running Triton."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from tests.support.waiting import until
from tokenrouter.openai_api.app import Settings, create_app
from tokenrouter.openai_api.deployment import Deployment
from tools.tritonserver.ports import free_port

TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"


@contextmanager
def served(repository: Path, grpc_url: str, entry: str = "tokenrouter", **settings: Any) -> Iterator[str]:
    """Base URL of a server of this process."""
    port = free_port()
    app = create_app(Deployment(repository, entry, TEMPLATE), Settings(grpc_url, **settings))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="on"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
