# The line and its flow: server, worker and one-off commands run from this one image. The clone itself is mounted at
# /line, so that DVC's cache, the data and the releases outlive a container.
FROM python:3.11-slim-bookworm

# Debian takes a version out of its archive when it mends it: a pinned one would stop the build at every security update.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends git make \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --create-home line

WORKDIR /line
COPY constraints.txt requirements-data.txt pyproject.toml README.md ./
# Only what the environment needs; the packages of this repository come from the mounted clone (PYTHONPATH below).
RUN python -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; print('\n'.join(p['dependencies']))" > /tmp/needs.txt \
 && pip install --no-cache-dir -c constraints.txt -r /tmp/needs.txt \
 && pip install --no-cache-dir --no-deps -r requirements-data.txt

ENV PYTHONPATH=/line DO_NOT_TRACK=1 DVC_NO_ANALYTICS=1 GX_ANALYTICS_ENABLED=false \
    PREFECT_SERVER_ANALYTICS_ENABLED=false HF_HUB_OFFLINE=1
# A mounted clone has another owner than this user.
RUN git config --system --add safe.directory /line
# by number, so that an orchestrator that demands another user than root can see it
USER 10001
CMD ["prefect", "--help"]
