# specdec's images, on x86-64 and aarch64. `make images` builds all three.
#
#   router      the router and loadtest/, without torch and vLLM
#   engine      verifier and draft on NVIDIA GPUs, in vLLM's own image; the build needs no GPU
#   engine-cpu  the whole stack on any machine, and what `docker build .` makes:
#
#     docker build -t specdec-cpu .
#     docker run --rm -it --shm-size 512m specdec-cpu demo
#     docker run --rm -p 8000:8000 --shm-size 512m specdec-cpu
#
# On aarch64 (a Mac with Apple silicon) engine-cpu needs `--build-arg TORCH_INDEX=URL`, an index with torch's CPU build:
# vLLM's library for aarch64 takes a BLAS function from it that the public index's CUDA build lacks. On x86-64 either
# serves, and the CPU build halves the image.
#
# Any uid may run them, with a read-only root too: they write to /cache, /tmp and /dev/shm. tini: a process 1 without a
# handler ignores SIGTERM, and services that still start, the model's conversion and the demo have none. -s: in a pod
# that shares its process namespace tini is not process 1.

ARG BASE=python:3.12-slim-bookworm
ARG ENGINE_BASE=vllm/vllm-openai:v0.32.0


FROM ${BASE} AS python

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnuma1 tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/specdec


FROM python AS router

# In each image specdec is installed as a link to services/, empty yet, so that a change of its code leaves the layer
# with all else alone.
COPY pyproject.toml ./
COPY requirements/lock.txt requirements/
RUN --mount=type=cache,target=/root/.cache/pip \
    mkdir services && touch README.md \
    && python3 -m venv .venv \
    && .venv/bin/python -m pip install -q -c requirements/lock.txt setuptools \
    && .venv/bin/python -m pip install -q -c requirements/lock.txt --no-build-isolation -e . \
    && .venv/bin/python -m pip uninstall -q -y setuptools pip

COPY services/ services/
RUN chmod -R a+rX services && python3 -m compileall -q services

# `python -m loadtest` there, as loadtest/job.yaml runs it.
WORKDIR /app
COPY loadtest/ loadtest/
RUN chmod -R a+rX . && mkdir -m 777 /cache

# USER: libraries that ask for the user's name find no entry in /etc/passwd.
ENV PATH=/opt/specdec/.venv/bin:$PATH \
    USER=specdec \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    SPECDEC_ROUTER_HOST=0.0.0.0 \
    SPECDEC_ROUTER_ADMIN_HOST=0.0.0.0

ARG VERSION=""
LABEL org.opencontainers.image.title="specdec-router" \
      org.opencontainers.image.description="Speculative decoding served across processes: the router" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"

USER 10001:0
EXPOSE 8000 8001
ENTRYPOINT ["tini", "-s", "--", "specdec"]
CMD ["router"]


FROM ${ENGINE_BASE} AS engine

USER 0
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/specdec

COPY pyproject.toml ./
COPY requirements/lock.txt requirements/
COPY tools/engine_image.py tools/
RUN --mount=type=cache,target=/root/.cache/pip \
    mkdir services && touch README.md && python3 tools/engine_image.py install

COPY services/ services/
RUN chmod -R a+rX services && python3 -m compileall -q services \
    && python3 tools/engine_image.py check \
    && mkdir -m 777 /cache

# Where vLLM and what it brings keep what they compile or fetch. HOME is for those without a variable of their own:
# CUDA's and TVM's caches, FlashInfer's, and vLLM's notes. (The lint rule takes TIKTOKEN for a secret.)
# hadolint ignore=DL3064
ENV USER=specdec \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    XDG_CONFIG_HOME=/cache/config \
    SPECDEC_CACHE=/cache \
    HF_HOME=/cache/huggingface \
    VLLM_CACHE_ROOT=/cache/vllm \
    TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor \
    NUMBA_CACHE_DIR=/cache/numba \
    TIKTOKEN_CACHE_DIR=/cache/tiktoken \
    TIKTOKEN_RS_CACHE_DIR=/cache/tiktoken-rs

ARG VERSION=""
LABEL org.opencontainers.image.title="specdec-engine" \
      org.opencontainers.image.description="Speculative decoding served across processes: verifier and draft" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"

USER 10001:0
EXPOSE 8100 8101 8102 8103
ENTRYPOINT ["tini", "-s", "--", "specdec"]
CMD ["--help"]


FROM python AS engine-cpu

ARG TORCH_INDEX=""

# The set-up's steps without the checks before them, which are about the machine that runs a demo. Compiled afterwards,
# on all cores; some packages carry files for newer Pythons only.
COPY pyproject.toml ./
COPY requirements/runtime.txt requirements/
COPY tools/setup.py tools/
RUN --mount=type=cache,target=/root/.cache/pip \
    mkdir services && touch README.md \
    && PIP_NO_COMPILE=1 python3 -c 'import sys; sys.path.append("tools"); import os, setup; setup.build(setup.ROOT / ".venv", os.environ.get("TORCH_INDEX"), setup.RUNTIME)' \
    && { .venv/bin/python -m compileall -q -j 0 .venv >/dev/null || true; }

# vLLM only warns where its library cannot be loaded, and fails when it serves.
RUN .venv/bin/python -c 'import torch, vllm._custom_ops; torch.ops._C.init_cpu_memory_env' \
    || { echo "vLLM's library does not load with this torch: see TORCH_INDEX at the top of the Dockerfile" >&2; exit 1; }

COPY services/ services/
RUN chmod -R a+rX services && python3 -m compileall -q services

# For any uid and group. The demo model is converted into it at the first start.
RUN mkdir -m 777 /cache
VOLUME /cache

# As in `engine`.
# hadolint ignore=DL3064
ENV PATH=/opt/specdec/.venv/bin:$PATH \
    USER=specdec \
    HOME=/cache \
    XDG_CACHE_HOME=/cache \
    XDG_CONFIG_HOME=/cache/config \
    SPECDEC_CACHE=/cache \
    HF_HOME=/cache/huggingface \
    VLLM_CACHE_ROOT=/cache/vllm \
    TRITON_CACHE_DIR=/cache/triton \
    TORCHINDUCTOR_CACHE_DIR=/cache/torchinductor \
    NUMBA_CACHE_DIR=/cache/numba \
    TIKTOKEN_CACHE_DIR=/cache/tiktoken \
    TIKTOKEN_RS_CACHE_DIR=/cache/tiktoken-rs \
    SPECDEC_UP_HOST=0.0.0.0

ARG VERSION=""
LABEL org.opencontainers.image.title="specdec-engine-cpu" \
      org.opencontainers.image.description="Speculative decoding served across processes: the CPU stack" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"

USER 10001:0
EXPOSE 8000
ENTRYPOINT ["tini", "-s", "--", "specdec"]
CMD ["up"]
