# specdec on any docker host, on x86-64 and aarch64:
#
#     docker build -t specdec-cpu .
#     docker run --rm -it --shm-size 512m specdec-cpu demo
#     docker run --rm -p 8000:8000 --shm-size 512m specdec-cpu
#
# On aarch64 (a Mac with Apple silicon) the build needs `--build-arg TORCH_INDEX=URL`, an index with torch's CPU build:
# vLLM's library for aarch64 takes a BLAS function from it that the public index's CUDA build lacks. On x86-64 either
# serves, and the CPU build halves the image.
#
# Any uid may run it, with a read-only root too: it writes to /cache, /tmp and /dev/shm.

ARG BASE=python:3.12-slim-bookworm

FROM ${BASE} AS engine-cpu

# tini: a process 1 without a handler ignores SIGTERM, and the model's conversion and the demo have none.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends libnuma1 tini \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/specdec

ARG TORCH_INDEX=""

# All but specdec's own code, so that a change of it leaves this layer alone: specdec is installed as a link to
# services/, empty yet. The steps are run without the checks before them, which are about the machine that runs a demo.
COPY pyproject.toml ./
COPY requirements/ requirements/
COPY tools/setup.py tools/
RUN mkdir services && touch README.md \
    && PIP_NO_CACHE_DIR=1 python3 -c 'import sys; sys.path.append("tools"); import os, setup; setup.build(setup.ROOT / ".venv", os.environ.get("TORCH_INDEX"))' \
    && .venv/bin/python -m pip uninstall -q -y -r requirements/dev.in

# vLLM only warns where its library cannot be loaded, and fails when it serves.
RUN .venv/bin/python -c 'import torch, vllm._custom_ops; torch.ops._C.init_cpu_memory_env' \
    || { echo "vLLM's library does not load with this torch: see TORCH_INDEX at the top of the Dockerfile" >&2; exit 1; }

COPY services/ services/
RUN chmod -R a+rX services && python3 -m compileall -q services

# For any uid and group. The demo model is converted into it at the first start.
RUN mkdir -m 777 /cache
VOLUME /cache

# USER: libraries that ask for the user's name find no entry in /etc/passwd.
ENV PATH=/opt/specdec/.venv/bin:$PATH \
    HOME=/tmp \
    USER=specdec \
    SPECDEC_CACHE=/cache \
    HF_HOME=/cache/huggingface \
    SPECDEC_UP_HOST=0.0.0.0

LABEL org.opencontainers.image.title="specdec" \
      org.opencontainers.image.description="Speculative decoding served across processes: the CPU stack" \
      org.opencontainers.image.licenses="Apache-2.0"

USER 10001:0
EXPOSE 8000
ENTRYPOINT ["tini", "--", "specdec"]
CMD ["up"]
