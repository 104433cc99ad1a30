# The scheduler: measurements and policy, state in Redis; no torch.
# docker build -f deploy/images/scheduler.Dockerfile -t paceline/scheduler:0.1.0 .
# Explicit tag; any image with Python 3.11 under /usr/local works.
ARG BASE_IMAGE=python:3.11.14-slim-bookworm

FROM ${BASE_IMAGE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1
WORKDIR /src
COPY constraints.txt ./
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
       "${1}[scheduler]"
COPY deploy/images/health.py /opt/paceline/share/health.py

FROM ${BASE_IMAGE} AS final
LABEL org.opencontainers.image.title="paceline-scheduler" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 paceline \
    && useradd --uid 10001 --gid 10001 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin paceline \
    && python -m pip uninstall --yes --quiet pip setuptools wheel
COPY --from=build /opt/paceline /opt/paceline
ENV PATH=/opt/paceline/bin:/usr/local/bin:/usr/bin:/bin \
    HOME=/tmp \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
USER 10001:10001
EXPOSE 50053 9103
STOPSIGNAL SIGTERM
ENTRYPOINT ["/opt/paceline/bin/paceline-scheduler"]
