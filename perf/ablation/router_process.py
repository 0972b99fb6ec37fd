"""The process in which `ablation.OutsideRouter` has its decisions made: `python -m perf.ablation.router_process`."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import torch
from safetensors.torch import load_file

from perf.ablation.policies import decide
from tokenrouter.checkpoint import load_tokenizer
from tokenrouter.messages import PolicySpec
from tokenrouter.policies import Policy, PolicyContext, load_policy
from tokenrouter.repository import Repository

_ROOT = Path(__file__).resolve().parent.parent.parent
_PATIENCE_S = 60.0


@contextmanager
def router_process(
    address: Path, repository: Path, models: Sequence[str], policy: str, params: dict[str, object]
) -> Iterator[None]:
    """Runs the process while the block runs.

    Raises:
        RuntimeError: it ended, or does not listen in time.
    """
    setting = json.dumps([str(address), str(repository), list(models), policy, params])
    with subprocess.Popen([sys.executable, "-m", __name__, setting], cwd=_ROOT) as process:
        try:
            until = time.monotonic() + _PATIENCE_S
            while not address.exists():
                if process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError("the router's process does not start; its error stands above")
                time.sleep(0.05)
            yield
        finally:
            process.terminate()


def serve(setting: str) -> None:
    """Listens until it is ended; a thread per subserver."""
    address, repository, models, name, params = json.loads(setting)
    torch.set_num_threads(1)
    checkpoint = Repository(repository).checkpoint(models[0])
    context = PolicyContext(
        tuple(models),
        repository,
        tokenizer=load_tokenizer(checkpoint),
        input_embedding=lambda model: _embedding(checkpoint),
    )
    policy = load_policy(PolicySpec(name, json.dumps(params)), context)
    with Listener(address, "AF_UNIX") as listener:
        while True:
            threading.Thread(target=_answer, args=(listener.accept(), policy), daemon=True).start()


def _embedding(checkpoint: Path) -> torch.Tensor:
    """[V, H] of the small model; R2R reads it where its own file has none."""
    table: torch.Tensor = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    return table


def _answer(connection: Connection, policy: Policy) -> None:
    with connection, torch.inference_mode():
        while True:
            try:
                head, hidden = connection.recv()
                # Writable, as torch wants it.
                logits = torch.frombuffer(bytearray(connection.recv_bytes()), dtype=torch.float32)
            except (EOFError, ConnectionError):
                return
            connection.send(decide(policy, head, hidden, logits))


if __name__ == "__main__":
    serve(sys.argv[1])
