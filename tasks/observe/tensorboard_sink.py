"""TensorBoard's files of a run, through tensorboardX."""

import shutil
import sys
import time
from pathlib import Path

from tasks.observe.sinks import End, Point


class TensorBoardSink:
    """Writes a run's event file anew each time the run is gone on with: it is a copy of the metrics data set.

    Args:
        folder: for the file; what an earlier process left in it is removed.
    """

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

    def end(self, how: End) -> None:
        self._writer.close()
