"""The process that has the sinks: points come in as lines of JSON, failures go out as such.

It ends when its input does, which it does however the run ends: with what is left, within `timeout_s`. The last line says
how the run ended, {"end": "finished"} for example; a run that is killed says nothing.
"""

import json
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from tasks.observe.mlflow_sink import MlflowSink
from tasks.observe.sinks import End, Point, Sink, SinkSettings
from tasks.observe.tensorboard_sink import TensorBoardSink

Report = Callable[[str, int, str], None]
"""Told (which sink, points that it does not have, the error)."""


class Feed:
    """One sink and what it does not have yet; what fails is tried again with the next point.

    Args:
        name: what reports call it.
        make: makes the sink; called again until it succeeds.
        report: told of each failure.
        most: points that wait, of which the oldest go; None: all.
    """

    def __init__(self, name: str, make: Callable[[], Sink], report: Report, most: int | None = None) -> None:
        self._name, self._make, self._report = name, make, report
        self._sink: Sink | None = None
        self._waiting: deque[Point] = deque(maxlen=most)

    def add(self, points: Iterable[Point]) -> None:
        """Hand over points, in order, those that wait first."""
        self._waiting.extend(points)
        try:
            self._sink = self._sink or self._make()
            while self._waiting:
                point = self._waiting[0]
                if not self._sink.has(point.marker, point.step):
                    self._sink.write(point)
                self._waiting.popleft()
        except Exception as error:  # noqa: BLE001 - whatever a library raises: reported, and tried again
            self._tell(error)

    def end(self, how: End) -> None:
        """Hand over what waits, and say how the run ended."""
        self.add([])
        try:
            if self._sink is not None:
                self._sink.end(how)
        except Exception as error:  # noqa: BLE001 - whatever a library raises: reported
            self._tell(error)

    def _tell(self, error: Exception) -> None:
        self._report(self._name, len(self._waiting), f"{type(error).__name__}: {error}")


def feeds_of(settings: SinkSettings, report: Report) -> list[Feed]:
    """A feed for each sink that the settings name."""
    feeds = []
    if settings.tensorboard:
        feeds.append(Feed("TensorBoard", lambda: TensorBoardSink(Path(settings.tensorboard)), report))
    if settings.mlflow_uri:
        feeds.append(Feed("MLflow", lambda: MlflowSink(settings), report))
    return feeds


def serve(feeds_of: Callable[[SinkSettings, Report], list[Feed]]) -> None:
    """Feed the sinks that the settings on the command line name, until the input ends."""
    settings = SinkSettings(**json.loads(sys.argv[1]))
    out, sys.stdout = sys.stdout, sys.stderr  # what libraries print is no report
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def report(sink: str, n_waiting: int, error: str) -> None:
        out.write(json.dumps({"sink": sink, "n_waiting": n_waiting, "error": error}) + "\n")
        out.flush()

    def work() -> None:
        feeds = feeds_of(settings, report)
        end: End = "killed"
        while line := lines.get():
            values = json.loads(line)
            if "end" in values:
                end = values["end"]
                continue
            for feed in feeds:
                feed.add([Point(**values)])
        for feed in feeds:
            feed.end(end)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    for line in sys.stdin:
        lines.put(line)
    lines.put("")
    worker.join(settings.timeout_s)
    os._exit(int(worker.is_alive()))  # a request that hangs ends with it


if __name__ == "__main__":
    serve(feeds_of)
