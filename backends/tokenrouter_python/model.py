"""Triton's entry point for every model with `backend: "tokenrouter_python"`: picks the role, nothing else."""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
# Triton's stub does not read PYTHONPATH; users put the modules of their own policies there.
sys.path.extend(path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path)

from tokenrouter.triton.roles import start_role


class TritonPythonModel:
    """Triton's interface."""

    def initialize(self, args):
        """Loads the model; an exception's text is the reason that Triton shows."""
        self._role = start_role(args)

    def execute(self, requests):
        """Takes requests; responses go through their senders."""
        self._role.execute(requests)

    def finalize(self):
        """Ends the model."""
        self._role.finalize()
