# The trainer on a TPU VM:
#
#   docker build --file docker/tpu.Dockerfile --tag jaxrl_llm:tpu .
#   docker run --rm --privileged --net=host --volume "$PWD/runs:/srv/jaxrl/runs" jaxrl_llm:tpu train --config=FILE.py
#
# On a slice of several hosts, the same command runs on each; JAX finds the others.
FROM python:3.11-slim-bookworm

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /opt/jaxrl_llm
COPY pyproject.toml README.md LICENSE ./
COPY constraints constraints
COPY launch launch
COPY configs configs
COPY jaxrl_llm jaxrl_llm
# Some packages that reasoning-gym needs have no wheels, so pip compiles them.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && pip install --no-cache-dir --constraint constraints/py311.txt \
      '.[math,reasoning-gym,datasets,logging]' 'jax[tpu]' \
    && apt-get purge --yes --auto-remove gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# libtpu needs the devices of the host, which belong to root.
# hadolint ignore=DL3002
USER 0
WORKDIR /srv/jaxrl
ENTRYPOINT ["jaxrl"]
CMD ["--help"]
