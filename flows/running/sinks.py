"""A run's metrics for its sinks: those that are stored, when it is opened, and each step's when it is reported."""

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import polars as pl

from flows.config import RunConfig
from flows.looking.inspection import held_out
from flows.ui.progress import say
from tasks.observe.metrics import Metric
from tasks.observe.sink_client import NoSinks, SinkClient, Sinks
from tasks.observe.sinks import EVALUATION, Point, SinkSettings, points_of
from tasks.store.layout import RunFolder
from tasks.store.reader import scan

TENSORBOARD = "tensorboard"
"""Folder of TensorBoard's files in a run's folder, or in the local one of a run on S3."""


@asynccontextmanager
async def open_sinks(config: RunConfig, folder: RunFolder, run: str) -> AsyncIterator[Sinks]:
    """The sinks of a run, which have, or get, all that is stored of it."""
    observe = config.observe
    if not observe.tensorboard and not observe.mlflow_uri:
        yield NoSinks()
        return
    files = str(folder.local / TENSORBOARD) if observe.tensorboard else ""
    settings = SinkSettings(
        run=run,
        name=folder.name,
        tensorboard=files,
        mlflow_uri=observe.mlflow_uri,
        experiment=observe.experiment,
        timeout_s=observe.sink_timeout_s,
    )
    if files:
        say(f"TensorBoard's files: {files}")
    async with SinkClient(settings, say) as sinks:
        for point in await asyncio.to_thread(lambda: [*_steps(folder), *evaluations(folder)]):
            sinks.put(point)
        yield sinks


def evaluations(folder: RunFolder, version: int | None = None) -> Iterator[Point]:
    """The rewards of complete evaluations, of a version or of all."""
    for row in held_out(folder, version=version).to_dicts():
        values = {f"evaluation/{name}": value for name, value in row.items() if name != "step"}
        yield Point(
            EVALUATION, row["step"], {name: value for name, value in values.items() if math.isfinite(value)}
        )


def _steps(folder: RunFolder) -> Iterator[Point]:
    """The stored metrics of all steps, in order."""
    rows = scan(folder, "metrics", ["step", "name", "env", "stat", "value"])
    stored = rows.unique(["step", "name", "env", "stat"], keep="last").sort("step").collect()
    for (step,), of_step in stored.group_by("step", maintain_order=True):
        metrics = [Metric(**row) for row in of_step.select(pl.exclude("step")).to_dicts()]
        yield from points_of(int(str(step)), metrics)
