"""A run in an MLflow tracking server, through MLflow's client."""

import os
import re
import time
from collections.abc import Mapping

from tasks.observe.sinks import MARKERS, End, Kind, Point, SinkSettings

RUN_TAG = "rollmill.run"
"""Tag that holds a run's random id: by it a run that is gone on with finds its MLflow run."""
STATUSES: Mapping[End, str] = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
"""MLflow's words for how a run ended."""
RUNNING = "RUNNING"
MAX_BATCH = 1000
"""Metrics that MLflow takes in one request."""


class MlflowSink:
    """Goes on with the MLflow run of this run, or begins it."""

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
        self._run_id = run.info.run_id
        if run.info.status != RUNNING:
            self._client.update_run(self._run_id, RUNNING)
        self._written = {
            (kind, metric.step)
            for kind, marker in MARKERS.items()
            for metric in self._client.get_metric_history(self._run_id, marker)
        }

    def has(self, kind: Kind, step: int) -> bool:
        return (kind, step) in self._written

    def write(self, point: Point) -> None:
        # The marker goes last: a point that was cut off is written again as a whole.
        marker, now_ms = MARKERS[point.kind], int(time.time() * 1000)
        names = sorted(point.values, key=lambda name: name == marker)
        metrics = [self._metric(_key(name), point.values[name], now_ms, point.step) for name in names]
        for first in range(0, len(metrics), MAX_BATCH):
            self._client.log_batch(self._run_id, metrics[first : first + MAX_BATCH])
        self._written.add((point.kind, point.step))

    def end(self, how: End) -> None:
        self._client.set_terminated(self._run_id, STATUSES[how])


def _key(name: str) -> str:
    """A name in the characters that MLflow takes. Example: "train/ratio/max/verifiers:a" is "train/ratio/max/verifiers_a"."""
    return re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII)
