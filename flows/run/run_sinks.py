"""A run's metrics and spans on their way to TensorBoard, MLflow, Weights & Biases and an OpenTelemetry receiver."""

import asyncio
import math
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import polars as pl

from rollmill.flows.configuration.config import RunConfig
from rollmill.flows.prefect_integration.progress import say
from rollmill.tasks.look.tables.run_tables import read_held_out, read_held_out_by_env
from rollmill.tasks.observe.config import ObserveConfig
from rollmill.tasks.observe.metrics import Metric
from rollmill.tasks.observe.sinks.metric_sinks import EVALUATION, Point, SinkSettings, make_points
from rollmill.tasks.observe.sinks.sink_client import SinkClient
from rollmill.tasks.processes.python_child import python_command
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import scan
from rollmill.tasks.store.run.writable_run import OpenRun

# Seconds that a finished run waits for a sink to receive the remaining points: a dead receiver must not block it.
TIMEOUT_S = 20.0
# MLflow's own variable: other programs of a user name their experiment by it too.
EXPERIMENT_ENV = "MLFLOW_EXPERIMENT_NAME"

SPAN_SINK_COMMAND = tuple(python_command("rollmill.tasks.look.export.otlp_process"))
SPAN_SINK_REMEDY = (
    "the run continues without it; missing spans are sent when it answers again, and all are in the data set `spans`, which "
    "`rollmill spans RUN --otlp` sends"
)


@asynccontextmanager
async def open_span_sink(
    config: ObserveConfig,
    store: OpenRun,
    warn: Callable[[str], None] = say,
    timeout_s: float = TIMEOUT_S,
) -> AsyncIterator[None]:
    """Send each step's spans to the OpenTelemetry receiver once they are stored, until the context ends.

    Enter it before the run's writer, so that it ends after it.

    Args:
        config: names the receiver; without one, nothing is sent.
        store: the run.
        warn: prints a warning.
        timeout_s: seconds that the run's end waits for the receiver.
    """
    if not config.otlp_endpoint:
        yield
        return
    settings = SinkSettings(
        run=store.manifest.run,
        name=store.folder.name,
        folder=store.folder.location,
        otlp=config.otlp_endpoint,
        timeout_s=timeout_s,
    )
    async with SinkClient(settings, warn, SPAN_SINK_COMMAND, SPAN_SINK_REMEDY) as sink:
        store.spans.on_stored = lambda step: sink.put(Point("spans", step, {}))
        yield


# Folders of their files in a run's folder; for a run on S3, in its local folder.
TENSORBOARD, WANDB = "tensorboard", "wandb"


@asynccontextmanager
async def open_sinks(config: RunConfig, folder: RunFolder, run: str) -> AsyncIterator[SinkClient | None]:
    """Start the configured sinks of metrics; send them all stored metrics that they lack, and yield them for new ones.

    Yields None if none is configured.
    """
    observe = config.observe
    if not (observe.tensorboard or observe.mlflow_uri or observe.wandb or observe.prometheus_port):
        yield None
        return
    files = str(folder.local / TENSORBOARD) if observe.tensorboard else ""
    settings = SinkSettings(
        run=run,
        name=folder.name,
        tensorboard=files,
        mlflow_uri=observe.mlflow_uri,
        experiment=os.environ.get(EXPERIMENT_ENV, "rollmill"),
        wandb=str(folder.local / WANDB) if observe.wandb else "",
        prometheus_port=observe.prometheus_port,
        timeout_s=TIMEOUT_S,
    )
    if files:
        say(f"TensorBoard's files: {files}")
    async with SinkClient(settings, say) as sinks:
        # A sink drops points that it has, so a resumed run may send all of them.
        for point in await asyncio.to_thread(lambda: [*_step_points(folder), *evaluation_points(folder)]):
            sinks.put(point)
        yield sinks


def evaluation_points(folder: RunFolder, version: int | None = None) -> Iterator[Point]:
    """Yield a point for each complete evaluation, with every column of `read_held_out` but the step: one version, or all.

    Of several environments those of each follow, such as evaluation/reward/addition. Values that are not finite, and bounds that are
    not known, are left out.
    """
    by_env = read_held_out_by_env(folder, version).to_dicts()
    has_several = len({row["env"] for row in by_env}) > 1
    for row in read_held_out(folder, version=version).to_dicts():
        values = _finite_values(row, "")
        for other in by_env if has_several else ():
            if other["step"] == row["step"]:
                values |= _finite_values(other, f"/{other['env']}")
        yield Point(EVALUATION, row["step"], values)


def _finite_values(row: Mapping[str, Any], suffix: str) -> dict[str, float]:
    # TensorBoard and MLflow refuse numbers that are not finite.
    return {
        f"evaluation/{name}{suffix}": value
        for name, value in row.items()
        if name not in ("step", "env") and value is not None and math.isfinite(value)
    }


def _step_points(folder: RunFolder) -> Iterator[Point]:
    """Yield points with the stored metrics of all steps, in the order of steps."""
    rows = scan(folder, "metrics", ["step", "name", "env", "stat", "value"])
    stored = rows.unique(["step", "name", "env", "stat"], keep="last").sort("step").collect()
    for (step,), of_step in stored.group_by("step", maintain_order=True):
        metrics = [Metric(**row) for row in of_step.select(pl.exclude("step")).to_dicts()]
        yield from make_points(int(str(step)), metrics)
