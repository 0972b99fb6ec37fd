"""`python -m perf.fuzz.codec --seconds 60`: coverage looks for bytes that break the channel's framing or its messages.

The engine is libFuzzer through `atheris` (in the extra `test`; wheels exist for Linux on x86_64). It starts from one of
every message and from broken ones, and every input goes, as frames cut in two and as one payload, into the decoders of
both sides. An input may be refused as a ProtocolError; what is taken for a message has to come out of the encoder as it
came in. Anything else ends the run with exit code 1 and the input.
"""

from __future__ import annotations

import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from perf.command import run
from perf.fuzz.frames import TO_ORCHESTRATOR, TO_SUBSERVER, payload
from tokenrouter.channel.framing import FrameDecoder, frame
from tokenrouter.errors import ProtocolError
from tokenrouter.messages import decode_for_orchestrator, decode_for_subserver, encode
from tools.errors import CommandError

_SEEDS = 200
_LONGEST_BYTES = 4096


def check(data: bytes) -> None:
    """One input: a stream of frames as a peer might send it.

    Raises:
        AssertionError: the framing depends on how the bytes were cut, or a message changes on its way.
        Exception: whatever is no ProtocolError.
    """
    decoder, place = FrameDecoder(), len(data) // 2
    try:
        frames = decoder.feed(data[:place]) + decoder.feed(data[place:])
    except ProtocolError:
        frames = []
    else:
        assert frames == FrameDecoder().feed(data), "frames depend on how the bytes were cut"
    for content in (*frames, data):
        for decode in (decode_for_subserver, decode_for_orchestrator):
            try:
                message = decode(content)
            except ProtocolError:
                continue
            # NaN in a policy's state differs from itself, so bytes are compared.
            once = encode(message)
            assert encode(decode(once)) == once, "a message changes on its way"


def corpus(seed: int = 1) -> list[bytes]:
    """Inputs to begin with: every message in a frame, and some that are nearly messages."""
    draw = random.Random(seed)
    sound = [encode(message) for message in (*TO_SUBSERVER, *TO_ORCHESTRATOR)]
    broken = [payload(draw, messages) for messages in (TO_SUBSERVER, TO_ORCHESTRATOR) for _ in range(_SEEDS // 2)]
    return [frame(content) for content in (*sound, *broken) if len(content) < _LONGEST_BYTES]


def fuzz(seconds: int, seed: int) -> int:
    """Runs libFuzzer in a process of its own, since it ends the one that it runs in. Returns its exit code.

    Raises:
        CommandError: atheris is not installed.
    """
    try:
        import atheris  # noqa: F401
    except ImportError as exc:
        raise CommandError(f"perf.fuzz.codec needs atheris ({exc}): pip install atheris") from exc
    with tempfile.TemporaryDirectory() as folder:
        for number, content in enumerate(corpus(seed)):
            (Path(folder) / f"{number}").write_bytes(content)
        options = [f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={_LONGEST_BYTES}", "-print_final_stats=1"]
        command = [sys.executable, "-m", "perf.fuzz.coverage", folder, *options, f"-artifact_prefix={folder}/"]
        return subprocess.run(command, check=False).returncode


def main(
    seconds: Annotated[int, typer.Option(min=1, help="How long.")] = 60,
    seed: Annotated[int, typer.Option(min=1, help="Of libFuzzer.")] = 1,
) -> None:
    if fuzz(seconds, seed):
        raise typer.Exit(1)
    print("every input was refused, or came out as it went in")


if __name__ == "__main__":
    run(main)
