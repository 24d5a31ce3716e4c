"""Where a run's metrics go besides its data set, and what goes there.

A process of its own (tasks.observe.sink_process) has the libraries of the sinks, since they compute and wait as they
like; the run hands it one point after another (tasks.observe.sink_client).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from tasks.observe.metrics import ALL, Metric

STEP, EVALUATION = "train/updated", "evaluation/reward"
"""Markers of a step's training, and of the evaluation of a policy version."""
APART = frozenset(
    {
        "train/checkpoint_held_s",
        "train/checkpoint_written_s",
        "train/checkpoint_bytes",
        "sync/logprob_difference_at_start",
    }
)
"""Metrics that are stored before a step's others, or after them: each is a point of its own."""


End: TypeAlias = Literal["finished", "failed", "killed"]
"""How a run ended: done, with an error, or else: by Ctrl-C, or without a word."""


@dataclass(frozen=True, slots=True)
class Point:
    """What is measured at one place of the x axis.

    Attributes:
        marker: one of its names, which other points of the step lack: a sink that has it at a step has the whole point.
        step: the step, or the version of an evaluation.
        values: by name; finite or infinite, none NaN.
    """

    marker: str
    step: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SinkSettings:
    """Which sinks a run has.

    Attributes:
        run: its random id.
        name: what people call it.
        tensorboard: folder for TensorBoard's files; empty: none.
        mlflow_uri: tracking server; empty: none.
        experiment: MLflow's.
        folder: the run's, for sinks that read what is stored.
        otlp: receiver of OpenTelemetry's spans; empty: none.
        timeout_s: seconds that what is left may take when the run is over.
    """

    run: str
    name: str
    tensorboard: str = ""
    mlflow_uri: str = ""
    experiment: str = ""
    folder: str = ""
    otlp: str = ""
    timeout_s: float = 20.0


class Sink(Protocol):
    """Takes points, each once; any error may come out of it."""

    def has(self, marker: str, step: int) -> bool:
        """True when it has the point of this marker and step, from an earlier process of the run too."""

    def write(self, point: Point) -> None:
        """Take a point; it is kept when this returns."""

    def end(self, how: End) -> None:
        """The run has ended, for now at least; nothing is written after it."""


def values_of(metrics: Iterable[Metric]) -> dict[str, float]:
    """Metrics by the name that they have in a sink; without NaNs, which are means of nothing.

    Example: ("train/tokens", "all", "value") is "train/tokens", ("train/ratio", "all", "max") is "train/ratio/max";
    an environment's have the stat always, whatever it is called: ("train/tokens", "addition", "value") is
    "train/tokens/value/addition".
    """
    found = {}
    for metric in metrics:
        stat = [] if metric.stat == "value" and metric.env == ALL else [metric.stat]
        env = [] if metric.env == ALL else [metric.env]
        if metric.value == metric.value:
            found["/".join([metric.name, *stat, *env])] = metric.value
    return found


def points_of(step: int, metrics: Sequence[Metric]) -> list[Point]:
    """Metrics of a step: those of its training as one point, what is stored apart as one each."""
    together = values_of(each for each in metrics if each.name not in APART)
    alone = values_of(each for each in metrics if each.name in APART)
    if together and STEP not in together:
        alone, together = together | alone, {}
    points = [Point(name, step, {name: value}) for name, value in alone.items()]
    return [Point(STEP, step, together), *points] if together else points
