# The trainer on CPUs: docker build --file docker/cpu.Dockerfile --tag jaxrl_llm:cpu .
#
#   docker run --rm --volume "$PWD/runs:/srv/jaxrl/runs" jaxrl_llm:cpu train --config=quickstart
FROM python:3.11-slim-bookworm

# Isolation of untrusted programs (scorer code) where user namespaces are off.
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
      '.[math,reasoning-gym,datasets,logging]' \
    && apt-get purge --yes --auto-remove gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 1000 jaxrl && install --directory --owner=jaxrl /srv/jaxrl
USER 1000
WORKDIR /srv/jaxrl
ENTRYPOINT ["jaxrl"]
CMD ["--help"]
