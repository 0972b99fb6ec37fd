"""What a process needs before it imports a library that starts MPI jobs and opens GPUs."""

from __future__ import annotations

import os
from collections.abc import Sequence

# Of a launcher above us; with them the library would take part in its MPI job instead of starting one.
_JOB_VARIABLES = ("OMPI_", "PMIX_", "PMI_")


def clean_environment(gpus: Sequence[int]) -> None:
    """Prepares this process for the import: no foreign MPI job, and only the model's GPUs."""
    for name in [name for name in os.environ if name.startswith(_JOB_VARIABLES)]:
        del os.environ[name]
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
