"""Settings of what is measured and recorded."""

from typing import Literal

from rollmill.tasks.config import LINK, StageConfig, setting


class ObserveConfig(StageConfig):
    task_runs: Literal["all", "groups", "events"] = setting(
        "all",
        "What Prefect records of a step's groups: all: a task run for each rollout and each score; groups: one for each group; "
        "events: no task run, but an event for each group. Steps of more than 2,000 groups always have events.",
    )
    rollout_tags: tuple[str, ...] = setting(
        (),
        "Tags of rollout task runs, for Prefect's concurrency limits by tag. Each tag costs a request to Prefect's server for "
        "each task run.",
    )
    score_tags: tuple[str, ...] = setting((), "Tags of score task runs, as observe.rollout_tags.")
    viewer_url: str = setting(
        "http://127.0.0.1:4300",
        "Address at which `rollmill view RUN` listens, for the links to trajectories on Prefect's pages; empty: no links.",
        pattern=LINK,
    )
    diagnostics: bool = setting(
        False,
        "Sample the stacks of an event loop that stalls, and count objects by type when memory grows, so that warnings name the "
        "code and the types; costs the flow up to half a second for each warning of memory.",
    )
    tensorboard: bool = setting(
        False, "Write the metrics to RUN/tensorboard too (pip install 'rollmill[tensorboard]')."
    )
    mlflow_uri: str = setting(
        "",
        "MLflow tracking server that gets the metrics too (pip install 'rollmill[mlflow]'); empty: none. The environment variable "
        "MLFLOW_EXPERIMENT_NAME names the experiment; unset: rollmill.",
    )
    wandb: bool = setting(
        False,
        "Send the metrics to Weights & Biases too (pip install 'rollmill[wandb]'). Its own environment variables apply: WANDB_API_KEY, "
        "WANDB_PROJECT (unset: rollmill), WANDB_MODE=offline, ...",
    )
    prometheus_port: int = setting(
        0,
        "Port of this machine at which a Prometheus server reads the last metrics while the run lasts (http://127.0.0.1:PORT/metrics); "
        "0: none.",
        ge=0,
        le=65535,
    )
    otlp_endpoint: str = setting(
        "",
        "OpenTelemetry receiver, such as http://127.0.0.1:4318, that gets each step's spans too, by OTLP over HTTP "
        "(pip install 'rollmill[otel]'); empty: none.",
    )
    price_per_hour: float = setting(
        0.0,
        "Price of one hour of a vLLM server, and of a rank of the trainer, in any currency; `rollmill inspect --costs` then shows "
        "prices. 0: no prices.",
        ge=0.0,
    )
