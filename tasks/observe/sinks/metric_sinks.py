"""The sinks of a run's metrics besides its data set, and the points that are sent to them.

A separate process (rollmill.tasks.observe.sinks.sink_process) has the libraries of the sinks, since they compute and wait as they
like; the run sends it one point after another (rollmill.tasks.observe.sinks.sink_client).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from rollmill.tasks.observe.metrics import ALL, Metric

STEP, EVALUATION = "train/updated", "evaluation/reward"
"""Markers of a step's training, and of the evaluation of a policy version."""
APART = frozenset(
    {
        "train/checkpoint_held_s",
        "train/checkpoint_written_s",
        "train/checkpoint_bytes",
        "sync/logprob_difference_at_start",
        "sync/logprob_difference_at_start_mean",
    }
)
"""Metrics that are stored before a step's others, or after them: each is a separate point."""


RunEnd: TypeAlias = Literal["finished", "failed", "killed"]
"""How a run ended: done, with an error, or else: by Ctrl-C, or without a word."""


@dataclass(frozen=True, slots=True)
class Point:
    """The metrics of a step, or of an evaluated policy version, that are written to a sink together.

    Attributes:
        marker: name of one of the values, which no other point of the step has: a sink that has it at a step has the whole point.
        step: the step, or the version of an evaluation.
        values: values by metric name; finite or infinite, none NaN.
        is_new: True if it is written also to a sink that has an earlier point of the step, whose values are no longer true.
    """

    marker: str
    step: int
    values: Mapping[str, float]
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """Where a run's metrics and spans are written: TensorBoard, MLflow, Weights & Biases, OpenTelemetry.

    Attributes:
        run: random id of the run.
        name: name of the run.
        tensorboard: folder for TensorBoard's files; empty: none.
        mlflow_uri: tracking server; empty: none.
        experiment: name of the MLflow experiment.
        wandb: folder for the files of Weights & Biases; empty: none.
        prometheus_port: loopback port of the page of the last metrics; 0: none.
        folder: folder of the run, for sinks that read what is stored.
        otlp: receiver of OpenTelemetry's spans; empty: none.
        timeout_s: seconds that the remaining writes may take when the run is over.
    """

    run: str
    name: str
    tensorboard: str = ""
    mlflow_uri: str = ""
    experiment: str = ""
    wandb: str = ""
    prometheus_port: int = 0
    folder: str = ""
    otlp: str = ""
    timeout_s: float = 20.0


class Sink(Protocol):
    """Interface of a destination for metrics, such as MLflow; each point is written once, and any error may be raised."""

    def has(self, marker: str, step: int) -> bool:
        """Return True if the sink has the point with this marker and step, whichever process of the run wrote it."""

    def write(self, point: Point) -> None:
        """Write a point; it is stored when the call returns."""

    def end(self, how: RunEnd) -> None:
        """Report how the run ended; no point is written afterwards."""


def metric_values(metrics: Iterable[Metric]) -> dict[str, float]:
    """Return values by the names that metrics have in a sink; NaNs, which are means of nothing, are left out.

    Example: ("train/tokens", "all", "value") is "train/tokens", ("train/ratio", "all", "max") is "train/ratio/max". The name of one
    environment's metric always has the stat: ("train/tokens", "addition", "value") is "train/tokens/value/addition".
    """
    found = {}
    for metric in metrics:
        stat = [] if metric.stat == "value" and metric.env == ALL else [metric.stat]
        env = [] if metric.env == ALL else [metric.env]
        if metric.value == metric.value:
            found["/".join([metric.name, *stat, *env])] = metric.value
    return found


def make_points(step: int, metrics: Sequence[Metric]) -> list[Point]:
    """Return a step's metrics as points: one with those of the training, and one for each name in `APART`, computed later."""
    together = metric_values(each for each in metrics if each.name not in APART)
    alone = metric_values(each for each in metrics if each.name in APART)
    if together and STEP not in together:
        alone, together = together | alone, {}
    points = [Point(name, step, {name: value}) for name, value in alone.items()]
    return [Point(STEP, step, together), *points] if together else points
