# A drafter: a drafter's weights and state.
# CPU:  docker build -f deploy/images/drafter.Dockerfile -t paceline/drafter:0.1.0 .
# CUDA: the same with --build-arg TORCH_INDEX_URL=https://download.pytorch.org/whl/cu130, say (the wheels carry CUDA,
#       the node's driver comes in through the container runtime).
# Explicit tag; any image with Python 3.11 under /usr/local works.
ARG BASE_IMAGE=python:3.11.14-slim-bookworm

FROM ${BASE_IMAGE} AS build
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY constraints.txt ./
# For the CPU kernels (paceline/{target,sampling}/kernels); without a compiler the wheel is built without them.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv --without-pip /opt/paceline \
    && pip install --no-cache-dir --constraint constraints.txt "setuptools>=77" wheel
COPY pyproject.toml README.md LICENSE ./
COPY paceline paceline
COPY services services
COPY orchestrator orchestrator
COPY experiments experiments
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /dist .
# One wheel lies there; its extras name what this process needs and nothing else.
RUN set -- /dist/paceline-*.whl \
    && pip --python /opt/paceline/bin/python install --no-cache-dir --constraint constraints.txt \
       --extra-index-url "${TORCH_INDEX_URL}" "${1}[drafter]"
COPY deploy/images/health.py /opt/paceline/share/health.py
# Where the chart and the compose file look for the drafters that ship with Paceline.
RUN ln -s ../lib/python3.11/site-packages/paceline/assets/drafters /opt/paceline/share/drafters

FROM ${BASE_IMAGE} AS final
LABEL org.opencontainers.image.title="paceline-drafter" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 paceline \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin paceline \
    && install --directory --owner=10001 --group=10001 /var/lib/paceline/models \
    && python -m pip uninstall --yes --quiet pip setuptools wheel
COPY --from=build /opt/paceline /opt/paceline
ENV PATH=/opt/paceline/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HUB_OFFLINE=1 \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /tmp
USER 10001:10001
EXPOSE 50052 9102
STOPSIGNAL SIGTERM
ENTRYPOINT ["/opt/paceline/bin/paceline-drafter"]
