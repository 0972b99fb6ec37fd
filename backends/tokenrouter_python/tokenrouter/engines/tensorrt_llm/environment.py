"""What a process needs before it imports a library that starts MPI jobs and opens GPUs.

MPI workers inherit the environment, and the device files that are open, of the process that spawns them. So this comes
before the first `import tensorrt_llm`, which opens every GPU that it can see.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from tokenrouter.errors import ConfigError

# Of the MPI job that Triton may be part of: with them the library would take part in that job instead of starting one.
# Configuration (OMPI_MCA_*, PMIX_MCA_*) stays. The list is that of NVIDIA's own models, in
# triton_backend/all_models/llmapi/tensorrt_llm/1/model.py.
JOB_VARIABLES = frozenset(
    (
        *(f"OMPI_COMM_WORLD_{name}" for name in ("SIZE", "RANK", "LOCAL_SIZE", "LOCAL_RANK", "NODE_RANK")),
        *(f"OMPI_{name}" for name in ("UNIVERSE_SIZE", "FIRST_RANKS", "APP_CTX_NUM_PROCS")),
        *(f"PMIX_SERVER_{name}" for name in ("URI", "URI2", "URI21", "URI3", "TMPDIR")),
        *(f"PMIX_{name}" for name in ("RANK", "NAMESPACE", "SYSTEM_TMPDIR", "SECURITY_MODE", "VERSION", "HOSTNAME")),
        *(f"PMIX_{name}_MODULE" for name in ("GDS", "BFROPS", "PTL")),
        *(f"PMI_{name}" for name in ("RANK", "SIZE", "FD", "SPAWNED", "APPNUM")),
    )
)
JOB_PREFIXES = ("OMPI_MCA_orte_", "ORTE_")
# Set by TensorRT-LLM's launcher for models that span nodes (tensorrt_llm/llmapi/trtllm-llmapi-launch).
LAUNCHER = "TLLM_SPAWN_PROXY_PROCESS"


def clean_environment(gpus: Sequence[int]) -> None:
    """Prepares this process for the import: no foreign MPI job, and only the model's GPUs.

    Raises:
        ConfigError: the server was started by TensorRT-LLM's launcher, whose workers belong to one model.
    """
    if LAUNCHER in os.environ:
        raise ConfigError(
            f"{LAUNCHER} is {os.environ[LAUNCHER]!r}: the server runs under trtllm-llmapi-launch, whose one MPI job "
            "holds the workers of one model, and a deployment has several; models that span nodes are not supported. "
            "Start tritonserver without it, with every model on the GPUs of one node"
        )
    for name in [name for name in os.environ if name in JOB_VARIABLES or name.startswith(JOB_PREFIXES)]:
        del os.environ[name]
    if gpus:
        # From 1.3 on the second one is what reaches workers.
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["TRTLLM_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
