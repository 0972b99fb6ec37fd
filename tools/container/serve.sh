#!/bin/sh
# What the GPU image runs: serves $MODEL_REPOSITORY under the supervisor (docs/reliability.md). Arguments are options of
# tools.launch; what it does not know goes to tritonserver.
# No mpirun: each model starts the worker processes of its own engine (NVIDIA's --no-mpi way).
set -eu

repository=${MODEL_REPOSITORY:-/models}
if ! ls "$repository"/*/config.pbtxt >/dev/null 2>&1; then
    echo "$repository has no model (*/config.pbtxt): write one with python3 -m tools.build_repository, mount it there" >&2
    exit 1
fi

if [ "${TOKENROUTER_MPS:-0}" = 1 ]; then
    export CUDA_MPS_PIPE_DIRECTORY="${CUDA_MPS_PIPE_DIRECTORY:-/tmp/nvidia-mps}"
    export CUDA_MPS_LOG_DIRECTORY="${CUDA_MPS_LOG_DIRECTORY:-/tmp/nvidia-mps-log}"
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    # One MPS server serves one user: this daemon and all models run as the same one.
    nvidia-cuda-mps-control -d
fi

root=$(CDPATH='' cd -- "$(dirname -- "$0")/../.." && pwd)
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
exec python3 -m tools.launch \
    --model-repository="$repository" \
    --host="${LISTEN_ADDRESS:-0.0.0.0}" \
    --exit-timeout="${TOKENROUTER_EXIT_TIMEOUT_S:-60}" \
    --ready-timeout="${TOKENROUTER_READY_TIMEOUT_S:-1800}" \
    --no-openai --no-greeting \
    "$@"
