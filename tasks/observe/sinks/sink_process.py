"""Worker process that writes metrics to TensorBoard, MLflow, Prometheus and Weights & Biases: each request is a point, and its answer the failures.

It ends when the connection is closed, however the run ends: with what is left, within `timeout_s`. The last request says how
the run ended, {"end": "finished"} for example; a run that is killed sends none.
"""

import json
import os
import re
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rollmill.tasks.observe.sinks.metric_sinks import Point, RunEnd, Sink, SinkSettings
from rollmill.tasks.observe.sinks.prometheus_sink import PrometheusSink
from rollmill.tasks.observe.sinks.wandb_sink import WandbSink
from rollmill.tasks.user_code.worker_main import Handler, serve

RUN_TAG = "rollmill.run"
"""Tag that holds a run's random id: by it a resumed run finds its MLflow run."""
STATUSES: Mapping[RunEnd, str] = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
"""MLflow's words for how a run ended."""
RUNNING = "RUNNING"
MAX_BATCH = 1000
"""Metrics that MLflow takes in one request."""


class MlflowSink:
    """Writes a run's points to the MLflow run that is tagged with the run's id, which is created if there is none.

    Attributes:
        run_id: id of the MLflow run.
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
            history = self._client.get_metric_history(self.run_id, _mlflow_name(marker))
            self._written[marker] = {metric.step for metric in history}
        return step in self._written[marker]

    def write(self, point: Point) -> None:
        # The marker goes last: a point that was cut off is written again as a whole.
        now_ms = int(time.time() * 1000)
        names = sorted(point.values, key=lambda name: name == point.marker)
        metrics = [self._metric(_mlflow_name(name), point.values[name], now_ms, point.step) for name in names]
        for first in range(0, len(metrics), MAX_BATCH):
            self._client.log_batch(self.run_id, metrics[first : first + MAX_BATCH])
        self._written.setdefault(point.marker, set()).add(point.step)

    def end(self, how: RunEnd) -> None:
        self._client.set_terminated(self.run_id, STATUSES[how])


def _mlflow_name(name: str) -> str:
    """Replace characters that MLflow refuses by "_". Example: "train/ratio/max/verifiers:a" to "train/ratio/max/verifiers_a"."""
    return re.sub(r"[^\w./ -]", "_", name, flags=re.ASCII)


class TensorBoardSink:
    """Writes a run's points to a TensorBoard event file in a folder, which is emptied first: a resumed run writes all again."""

    def __init__(self, folder: Path) -> None:
        # tensorboardX takes torch's tensors too, and imports torch for that alone where it is installed: 300 MB.
        sys.modules.setdefault("torch", None)  # type: ignore[arg-type] # None: not to be imported
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary

        self._event, self._summary = Event, Summary
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._writer = EventsWriter(str(folder / "events"))
        # A reader that has seen an earlier file forgets what it had of the steps from 0.
        self._writer.write_event(Event(step=0, session_log=SessionLog(status=SessionLog.START)))
        self._written: set[tuple[str, int]] = set()

    def has(self, marker: str, step: int) -> bool:
        return (marker, step) in self._written

    def write(self, point: Point) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in point.values.items()]
        event = self._event(wall_time=time.time(), step=point.step, summary=self._summary(value=values))
        self._writer.write_event(event)
        self._writer.flush()
        self._written.add((point.marker, point.step))

    def end(self, how: RunEnd) -> None:
        self._writer.close()


Report = Callable[[str, int, str], None]
"""Called with (name of the sink, number of points that it does not have, the error)."""


class Feed:
    """Sends points to one sink, in order; points that it did not accept wait and are sent again with the next one.

    Args:
        name: name of the sink in reports.
        make: makes the sink; called again until it succeeds.
        report: called for each failure.
        most: most points that wait, beyond which the oldest are dropped; None: no limit.
    """

    def __init__(self, name: str, make: Callable[[], Sink], report: Report, most: int | None = None) -> None:
        self._name, self._make, self._report = name, make, report
        self._sink: Sink | None = None
        self._waiting: deque[Point] = deque(maxlen=most)

    def add(self, points: Iterable[Point]) -> None:
        """Send points to the sink in order, waiting ones first."""
        self._waiting.extend(points)
        try:
            self._sink = self._sink or self._make()
            while self._waiting:
                point = self._waiting[0]
                if point.is_new or not self._sink.has(point.marker, point.step):
                    self._sink.write(point)
                self._waiting.popleft()
        except Exception as error:  # noqa: BLE001 - whatever a library raises: reported, and tried again
            self._tell(error)

    def end(self, how: RunEnd) -> None:
        """Send the waiting points, then report to the sink how the run ended."""
        self.add([])
        try:
            if self._sink is not None:
                self._sink.end(how)
        except Exception as error:  # noqa: BLE001 - whatever a library raises: reported
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        self._report(self._name, len(self._waiting), f"{type(error).__name__}: {error}")


def make_feeds(settings: SinkSettings, report: Report) -> list[Feed]:
    """Create a Feed for each sink that the settings name."""
    feeds = []
    if settings.tensorboard:
        feeds.append(Feed("TensorBoard", lambda: TensorBoardSink(Path(settings.tensorboard)), report))
    if settings.mlflow_uri:
        feeds.append(Feed("MLflow", lambda: MlflowSink(settings), report))
    if settings.prometheus_port:
        feeds.append(Feed("Prometheus", lambda: PrometheusSink(settings), report))
    if settings.wandb:
        feeds.append(Feed("Weights & Biases", lambda: WandbSink(settings), report))
    return feeds


def run_sinks(make_feeds: Callable[[SinkSettings, Report], list[Feed]]) -> None:
    """Run the sink process: send each point that it receives to every sink of the settings, until the connection closes."""
    feeds: list[Feed] = []
    reports: list[tuple[str, int, str]] = []
    has_end = False

    def create(settings: bytes) -> Handler:
        feeds.extend(make_feeds(SinkSettings(**json.loads(settings)), lambda *each: reports.append(each)))
        return take

    def take(body: bytes) -> bytes:
        nonlocal has_end
        values = json.loads(body)
        has_end = "end" in values
        for feed in feeds:
            if has_end:
                feed.end(values["end"])
            else:
                feed.add([Point(**values)])
        answer = json.dumps(reports).encode()
        reports.clear()
        return answer

    # The supervisor sends SIGTERM when the run is over or was killed, but the points that were sent until then are written.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serve(create)
    if not has_end:
        for feed in feeds:
            feed.end("killed")
    # Threads of libraries may hang.
    os._exit(0)


if __name__ == "__main__":
    run_sinks(make_feeds)
