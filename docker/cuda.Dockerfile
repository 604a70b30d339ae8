# The trainer on NVIDIA GPUs, with an environment of vLLM servers:
#
#   docker build --file docker/cuda.Dockerfile --tag jaxrl_llm:cuda .
#   docker run --rm --gpus all --shm-size=16g --volume "$PWD/runs:/srv/jaxrl/runs" jaxrl_llm:cuda train --config=FILE.py
#
# JAX's wheels bring CUDA's libraries; the host has the driver and NVIDIA's container toolkit.
FROM python:3.11-slim-bookworm

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/jaxrl_llm
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY launch launch
COPY configs configs
COPY jaxrl_llm jaxrl_llm
RUN pip install --no-cache-dir --constraint constraints/py311.txt \
    '.[math,reasoning-gym,datasets,logging]' 'jax[cuda12]'

# vLLM has an environment of its own, because its pins conflict with the trainer's: rollout.vllm.environment names it.
ARG VLLM=vllm==0.32.0
RUN python -m venv /opt/vllm \
    && /opt/vllm/bin/pip install --no-cache-dir "$VLLM" 'xxhash>=4.1'

RUN useradd --create-home --uid 1000 jaxrl && install --directory --owner=jaxrl /srv/jaxrl \
    && ln --symbolic /opt/vllm /srv/jaxrl/.venv-vllm
USER 1000
WORKDIR /srv/jaxrl
ENTRYPOINT ["jaxrl"]
CMD ["--help"]
