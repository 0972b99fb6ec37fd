"""The process in which `policies.OutsideRouter` has its decisions made."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file

from tokenrouter.checkpoint import load_tokenizer
from tokenrouter.messages import PolicySpec
from tokenrouter.policies import Policy, PolicyContext, load_policy
from tokenrouter.policies.base import RouteBatch, destination_names
from tokenrouter.repository import Repository

_PATIENCE_S = 60.0


@contextmanager
def router_process(
    address: Path, repository: Path, models: Sequence[str], policy: str, params: dict[str, Any]
) -> Iterator[None]:
    """Runs the process while the block runs.

    Raises:
        RuntimeError: it ended, or does not listen in time.
    """
    spec = PolicySpec(policy, msgspec.json.encode(params).decode())
    process = get_context("spawn").Process(target=_serve, args=(address, repository, tuple(models), spec), daemon=True)
    process.start()
    try:
        until = time.monotonic() + _PATIENCE_S
        while not address.exists():
            if not process.is_alive() or time.monotonic() > until:
                raise RuntimeError("the router's process does not start; its error stands above")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.join()


def _serve(address: Path, repository: Path, models: tuple[str, ...], spec: PolicySpec) -> None:
    """Listens until it is ended; a thread per subserver."""
    torch.set_num_threads(1)
    checkpoint = Repository(repository).checkpoint(models[0])
    context = PolicyContext(
        models,
        str(repository),
        tokenizer=load_tokenizer(checkpoint),
        # [V, H] of the small model; R2R reads it where its own file has none.
        input_embedding=lambda model: load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"],
    )
    policy = load_policy(spec, context)
    with Listener(str(address), "AF_UNIX") as listener:
        while True:
            threading.Thread(target=_answer, args=(listener.accept(), policy), daemon=True).start()


def _answer(connection: Connection, policy: Policy) -> None:
    with connection, torch.inference_mode():
        while True:
            try:
                head, hidden = connection.recv()
                # Writable, as torch wants it.
                logits = torch.frombuffer(bytearray(connection.recv_bytes()), dtype=torch.float32)
            except (EOFError, ConnectionError):
                return
            connection.send(_decided(policy, head, hidden, logits))


def _decided(policy: Policy, head: Any, hidden: Any, logits: torch.Tensor) -> list[str]:
    """The policy's own `route`, on copies. Histories stay where they are, so rows have no tokens here."""
    model, seeds, positions, tokens, width = head
    rows: list[Any] = [
        SimpleNamespace(model=model, seed=seed, position=position, state={})
        for seed, position in zip(seeds, positions, strict=True)
    ]
    batch = RouteBatch(
        model=model,
        rows=rows,
        tokens=torch.from_numpy(tokens),
        logits=logits.view(len(rows), -1)[:, :width],
        hidden=None if hidden is None else torch.from_numpy(hidden),
    )
    return destination_names(policy.route(batch), batch, policy.models)
