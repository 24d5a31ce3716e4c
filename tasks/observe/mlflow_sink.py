"""A run in an MLflow tracking server, through MLflow's client."""

import os
import re
import time
from collections.abc import Mapping

from tasks.observe.sinks import End, Point, SinkSettings

RUN_TAG = "rollmill.run"
"""Tag that holds a run's random id: by it a run that is gone on with finds its MLflow run."""
STATUSES: Mapping[End, str] = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
"""MLflow's words for how a run ended."""
RUNNING = "RUNNING"
MAX_BATCH = 1000
"""Metrics that MLflow takes in one request."""


class MlflowSink:
    """Goes on with the MLflow run of this run, or begins it.

    Attributes:
        run_id: MLflow's.
    """

    def __init__(self, settings: SinkSettings) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # it is tried again with the next point
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        self._metric, self._client = Metric, MlflowClient(settings.mlflow_uri)
        experiment = self._client.get_experiment_by_name(settings.experiment)
        number = (
            experiment.experiment_id if experiment else self._client.create_experiment(settings.experiment)
        )
        found = self._client.search_runs([number], f"tags.`{RUN_TAG}` = '{settings.run}'", max_results=1)
        run = (
            found[0]
            if found
            else self._client.create_run(number, run_name=settings.name, tags={RUN_TAG: settings.run})
        )
        self.run_id = run.info.run_id
        if run.info.status != RUNNING:
            self._client.update_run(self.run_id, RUNNING)
        self._written: dict[str, set[int]] = {}

    def has(self, marker: str, step: int) -> bool:
        if marker not in self._written:
            history = self._client.get_metric_history(self.run_id, _key(marker))
            self._written[marker] = {metric.step for metric in history}
        return step in self._written[marker]

    def write(self, point: Point) -> None:
        # The marker goes last: a point that was cut off is written again as a whole.
        now_ms = int(time.time() * 1000)
        names = sorted(point.values, key=lambda name: name == point.marker)
        metrics = [self._metric(_key(name), point.values[name], now_ms, point.step) for name in names]
        for first in range(0, len(metrics), MAX_BATCH):
            self._client.log_batch(self.run_id, metrics[first : first + MAX_BATCH])
        self._written.setdefault(point.marker, set()).add(point.step)

    def end(self, how: End) -> None:
        self._client.set_terminated(self.run_id, STATUSES[how])


def _key(name: str) -> str:
    """A name in the characters that MLflow takes. Example: "train/ratio/max/verifiers:a" is "train/ratio/max/verifiers_a"."""
    return re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII)
