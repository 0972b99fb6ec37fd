# gpu (default): TokenRouter in NVIDIA's image with Triton and TensorRT-LLM.   docker build -t tokenrouter .
# cpu: the demo pair on the torch engine, without a GPU.   docker build --target cpu -t tokenrouter-demo .
# How to run them: compose.yaml and docs/deploy.md.
ARG TRITON_RELEASE=26.04
ARG GPU_BASE=nvcr.io/nvidia/tritonserver:${TRITON_RELEASE}-trtllm-python-py3
# Its Python must be the GPU image's, 3.12: wheels are collected here and installed there.
ARG CPU_BASE=python:3.12-slim

FROM ${CPU_BASE} AS wheels
ARG PIP_ARGS=""
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY requirements/serve.lock requirements/
COPY backends backends
# hadolint ignore=DL3042,SC2086
RUN python3 -m pip wheel --no-cache-dir ${PIP_ARGS} --constraint requirements/serve.lock --wheel-dir /wheels ".[openai,otel]"

FROM ${CPU_BASE} AS cpu
# pip's options, e.g. where to find PyTorch's CPU build; the default index may give a CUDA build of several GB.
ARG PIP_ARGS=""
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends curl \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/tokenrouter
COPY requirements/serve.lock requirements/
# hadolint ignore=SC2086
RUN python3 -m pip install --no-cache-dir ${PIP_ARGS} -r requirements/serve.lock
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    python3 -m pip install --no-cache-dir --no-deps /wheels/tokenrouter-*.whl
COPY backends/tokenrouter_python/model.py backends/tokenrouter_python/
COPY tools tools
COPY perf perf
COPY configs configs
COPY model_repository model_repository
USER 1000:1000
ENV HOME=/tmp
EXPOSE 8000 8001 8002 9000
HEALTHCHECK --interval=10s --timeout=5s --start-period=3m \
    CMD ["curl", "--fail", "--silent", "--show-error", "--output", "/dev/null", "http://127.0.0.1:8000/v2/health/ready"]
CMD ["python3", "-m", "tools.launch", "--host", "0.0.0.0"]

FROM ${GPU_BASE} AS gpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ARG TENSORRT_LLM_VERSION=1.2.1
USER 0
WORKDIR /opt/tokenrouter
COPY tools/container/missing.py tools/container/
# Adds what is missing; PyTorch, TensorRT-LLM and all else that the image brings stay as they are. Fails if something
# there is too old for us. The package lands in site-packages, where the engines' worker processes find it as well.
RUN --mount=type=bind,from=wheels,source=/wheels,target=/wheels \
    python3 tools/container/missing.py /wheels "tensorrt_llm==${TENSORRT_LLM_VERSION}" \
        | PIP_BREAK_SYSTEM_PACKAGES=1 xargs --no-run-if-empty python3 -m pip install --no-cache-dir --no-deps \
    && { python3 -m pip check || true; } | { ! grep "^tokenrouter "; } \
    && install -d -m 1777 /var/lib/tokenrouter
COPY backends/tokenrouter_python/model.py /opt/tritonserver/backends/tokenrouter_python/
COPY tools tools
COPY perf perf
COPY configs configs
RUN python3 -m tools.build_repository --help > /dev/null
# The image's user triton-server. Any other works too: HOME, where libraries cache compiled kernels, is open to all.
USER 1000:1000
# hadolint ignore=DL3064
ENV HOME=/var/lib/tokenrouter USER=triton-server HF_HUB_OFFLINE=1 \
    TOKENROUTER_CHECKPOINTS=/checkpoints TOKENROUTER_EXIT_TIMEOUT_S=60
EXPOSE 8000 8001 8002 9000
# Large models take minutes to load.
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m \
    CMD ["curl", "--fail", "--silent", "--show-error", "--output", "/dev/null", "http://127.0.0.1:8000/v2/health/ready"]
CMD ["/opt/tokenrouter/tools/container/serve.sh"]
