"""What a model's process imports: an entry model runs no tensors, so it starts without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.support.repositories import emulated_spec, write_emulated
from tokenrouter.policies import BUILTIN

# Triton's module exists inside its stub only.
_PROGRAM = """
import json, sys, types

sys.modules["triton_python_backend_utils"] = types.ModuleType("triton_python_backend_utils")
from tokenrouter.assembly import Entry
from tokenrouter.repository import Repository
from tokenrouter.triton import roles

repository = Repository(sys.argv[1])
entry = Entry(repository.entry(), repository)
entry.orchestrator()
print(json.dumps([name for name in ("torch", "transformers") if name in sys.modules]))
"""


def test_an_entry_model_imports_no_torch(tmp_path: Path) -> None:
    entry = {"selectable_policies": list(BUILTIN)}
    repository = write_emulated(tmp_path, emulated_spec(entry=entry))
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(repository)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
