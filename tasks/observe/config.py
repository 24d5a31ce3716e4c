"""Settings of what is measured and recorded."""

from typing import Literal

from tasks.config import StageConfig, setting


class ObserveConfig(StageConfig):
    task_runs: Literal["all", "groups", "events"] = setting(
        "all",
        "What Prefect records of the fan-out: a task run for each rollout and score task, one for each group, or "
        "none and an event for each group.",
    )
    step_runs: bool = setting(
        True,
        "Give each step, and each evaluation, a flow run of its own in Prefect, below that of the run, which has its "
        "rollouts and scores; false: one flow run has all of them.",
    )
    step_run_timeout_s: float = setting(
        5.0,
        "Seconds that a step waits at most for its flow run, which is made while the step before goes on.",
        ge=0.0,
    )
    step_page_every: int = setting(
        1,
        "Steps from one that has a page in Prefect (seconds, what was lost, trajectories to read) to the next; 0: none.",
        ge=0,
    )
    picture_every_s: float = setting(
        60.0, "Seconds at least from one drawing of the run's page in Prefect to the next.", ge=0.0
    )
    viewer_url: str = setting(
        "http://127.0.0.1:4300",
        "Address that the pages link to for trajectories, where `rollmill view RUN` listens; empty: no links.",
    )
    max_unrecorded_task_runs: int = setting(
        2000, "Task runs that Prefect has not recorded yet before new rollouts are held back.", ge=1, le=9000
    )
    hold_back_timeout_s: float = setting(
        60.0,
        "Seconds to hold rollouts back while Prefect records nothing; then the run goes on without a whole picture.",
        ge=0.0,
    )
    record_timeout_s: float = setting(
        60.0, "Seconds to wait at the run's end until Prefect has recorded it.", ge=0.0
    )
    leftovers_timeout_s: float = setting(
        30.0, "Seconds in which a start marks what killed attempts left in Prefect as crashed.", ge=0.0
    )
    exit_timeout_s: float = setting(
        3.0,
        "Seconds that a command whose run is over waits for Prefect to take the last logs and events.",
        ge=0.0,
    )
    max_stall_ms: float = setting(
        500.0,
        "Milliseconds that the flow's event loop may stand still before the log says where; 0: never.",
        ge=0.0,
    )
    max_lag_p99_ms: float = setting(
        100.0,
        "Milliseconds that 99 % of what a step's event loop does may be late by before the log says where; 0: never.",
        ge=0.0,
    )
    max_rss_growth: float = setting(
        0.25,
        "Share by which the memory of the flow, or of a process that it launched, may grow, once its first steps are done, "
        "before the log says so; 0: never.",
        ge=0.0,
    )
    tensorboard: bool = setting(
        False, "Write the metrics to RUN/tensorboard too (pip install 'rollmill[tensorboard]')."
    )
    mlflow_uri: str = setting(
        "", "MLflow tracking server that gets the metrics too (pip install 'rollmill[mlflow]'); empty: none."
    )
    otlp_endpoint: str = setting(
        "",
        "OpenTelemetry receiver, such as http://127.0.0.1:4318, that gets each step's spans too, by OTLP over HTTP "
        "(pip install 'rollmill[otel]'); empty: none.",
    )
    experiment: str = setting("rollmill", "Experiment of the run in MLflow.")
    sink_timeout_s: float = setting(
        20.0,
        "Seconds that a run waits at its end until TensorBoard's files, MLflow and the OpenTelemetry receiver have what is left.",
        ge=0.0,
    )
