#!/bin/sh
# What the GPU image runs: serves $MODEL_REPOSITORY with tritonserver. Arguments go to tritonserver; a later one wins.
# No mpirun: each model starts the worker processes of its own engine (NVIDIA's --no-mpi way).
set -eu

repository=${MODEL_REPOSITORY:-/models}
if ! ls "$repository"/*/config.pbtxt >/dev/null 2>&1; then
    echo "$repository has no model (*/config.pbtxt): write one with python3 -m tools.build_repository, mount it there" >&2
    exit 1
fi

# Subservers let running requests finish for as long as Triton waits for its models.
export TOKENROUTER_EXIT_TIMEOUT_S="${TOKENROUTER_EXIT_TIMEOUT_S:-60}"
export TOKENROUTER_RUNTIME_DIR="${TOKENROUTER_RUNTIME_DIR:-/tmp/tokenrouter}"

# Shared memory of a predecessor that was killed; it is still there where /dev/shm outlives the container (a pod's).
server=$(printf %s "$(uname -n)$TOKENROUTER_RUNTIME_DIR" | cksum | cut -d ' ' -f 1)
regions=tokenrouter-${server}_shm_region_
rm -f "/dev/shm/$regions"*

if [ "${TOKENROUTER_MPS:-0}" = 1 ]; then
    export CUDA_MPS_PIPE_DIRECTORY="${CUDA_MPS_PIPE_DIRECTORY:-/tmp/nvidia-mps}"
    export CUDA_MPS_LOG_DIRECTORY="${CUDA_MPS_LOG_DIRECTORY:-/tmp/nvidia-mps-log}"
    mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
    # One MPS server serves one user: this daemon and all models run as the same one.
    nvidia-cuda-mps-control -d
fi

address=${LISTEN_ADDRESS:-0.0.0.0}
exec tritonserver \
    --model-repository="$repository" \
    --disable-auto-complete-config \
    --backend-config="python,shm-region-prefix-name=$regions" \
    --exit-timeout-secs="$TOKENROUTER_EXIT_TIMEOUT_S" \
    --http-address="$address" --grpc-address="$address" --metrics-address="$address" \
    "$@"
