"""`python -m tools.hosts`: two hosts on two loopback addresses, each with its own launcher and tritonserver.

The entry model and the small model are on 127.0.0.1, the large one is on 127.0.0.2, and between them is a link of ours
with mutual TLS through it. Sends requests, prints how many tokens each host wrote, cuts the link once in the middle of
a response, and ends. docs/hosts.md says how two real hosts are set up.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenrouter.channel.address import Address
from tokenrouter.client import stream
from tools.errors import CommandError, reported
from tools.hosts.launched import LaunchedHost
from tools.hosts.relay import Relay
from tools.hosts.trial import write_trial, write_trial_certificates
from tools.load import read_prompts
from tools.tritonserver.ports import free_port

NEAR, FAR = "127.0.0.1", "127.0.0.2"
_SILENCE_S = 2.0
_TOKENS = 96


@reported()
def main(
    model_repository: Annotated[Path, typer.Option(help="The model repository.")] = Path("model_repository"),
    model: Annotated[str, typer.Option(help="The model on the other host.")] = "large",
    requests: Annotated[int, typer.Option(min=1, help="How many before the link is cut.")] = 6,
    cut: Annotated[float, typer.Option(min=0, help="Seconds for which the link is cut.")] = 4.0,
    delay_ms: Annotated[float, typer.Option(min=0, help="Of the link, one way.")] = 0.0,
) -> None:
    """Shows a deployment on two hosts."""
    prompts = read_prompts()
    with tempfile.TemporaryDirectory(prefix="hosts-") as name:
        folder = Path(name)
        listen = Address(FAR, free_port(FAR))
        with Relay(Address(NEAR, 0), listen, delay_s=delay_ms / 1e3) as relay:
            keys = write_trial_certificates(folder / "keys", relay.address, listen)
            repository = write_trial(
                model_repository,
                folder / "repository",
                model,
                public=relay.address,
                listen=listen,
                silence_s=_SILENCE_S,
            )
            others = [path.parent.name for path in repository.glob("*/config.pbtxt") if path.parent.name != model]
            far = LaunchedHost(FAR, repository, [model], address=FAR, keys=keys["far"])
            near = LaunchedHost(NEAR, repository, sorted(others), address=NEAR, keys=keys["entry"])
            with far, near:
                far.wait()
                near.wait()
                _show(near, far, relay, prompts, requests, cut, model)


def _show(
    near: LaunchedHost, far: LaunchedHost, relay: Relay, prompts: list[str], requests: int, cut: float, model: str
) -> None:
    print(f"\nready: gRPC {near.grpc_url} on {NEAR}; {model} on {FAR}, over {relay.address}", flush=True)
    written: Counter[str] = Counter()
    for number in range(requests):
        answer = _ask(near, prompts[number % len(prompts)])
        written.update(answer.routing["tokens"])
        print(f"request {number + 1}: {answer}", flush=True)
    for host, names in ((NEAR, sorted(written.keys() - {model})), (FAR, [model])):
        shown = ", ".join(f"{name} {written[name]}" for name in names)
        print(f"tokens written on {host}: {sum(written[name] for name in names)} ({shown})", flush=True)
    expected = _ask(near, prompts[0])
    print(f"\nthe link is cut for {cut:g} s in the middle of a response", flush=True)
    mended = threading.Timer(cut, relay.mend)

    def cut_link() -> None:
        relay.cut()
        mended.start()

    answer = _ask(near, prompts[0], begun=cut_link)
    mended.join()
    print(f"the response: {answer}; {relay.relayed} bytes passed the link", flush=True)
    if answer.ids != expected.ids:
        raise CommandError("it is another one than before")
    print("the same tokens as before; ending", flush=True)


@dataclass(frozen=True)
class _Answer:
    ids: list[int]
    routing: dict[str, Any]
    seconds: float

    def __str__(self) -> str:
        return f"{len(self.ids)} tokens in {self.seconds:.2f} s, {self.routing['handoffs']} hand-offs"


def _ask(near: LaunchedHost, prompt: str, begun: Callable[[], None] = lambda: None) -> _Answer:
    """One response; `begun` is called after its first tokens."""
    began_s = time.monotonic()
    ids: list[int] = []
    routing: dict[str, Any] = {}
    for chunk in stream(near.grpc_url, prompt, max_tokens=_TOKENS, temperature=0.0, seed=1):
        if not ids and chunk.output_ids:
            begun()
        ids += chunk.output_ids
        routing = chunk.routing
    return _Answer(ids, routing, time.monotonic() - began_s)


if __name__ == "__main__":
    typer.run(main)
