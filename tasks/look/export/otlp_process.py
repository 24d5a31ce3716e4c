"""Process that sends a run's spans to an OpenTelemetry receiver while the run continues.

The run sends only step numbers; the process reads the stored spans. A slow or missing receiver therefore delays nothing.
"""

from rollmill.tasks.look.export.otlp_export import export_traces
from rollmill.tasks.look.ledger.run_ledger import read_attempt_spans
from rollmill.tasks.observe.sinks.metric_sinks import Point, RunEnd, SinkSettings
from rollmill.tasks.observe.sinks.sink_process import Feed, Report, run_sinks
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_steps

LATE_STEPS = 8
"""Spans stored up to this many steps later are still sent, such as those of a checkpoint written in the background."""
MOST_WAITING = 1000
"""Most steps queued for a receiver; the oldest are dropped."""


class OtlpSink:
    """Sends spans to an OpenTelemetry receiver step by step, with late ones of previous steps, and none twice."""

    def __init__(self, settings: SinkSettings) -> None:
        self._settings, self._folder = settings, RunFolder(settings.folder)
        self._sent: dict[int, set[int]] = {}

    def has(self, marker: str, step: int) -> bool:
        """Return False: sent spans are remembered by id, not by step."""
        return False

    def write(self, point: Point) -> None:
        """Send the spans, not sent before, of a step and of up to LATE_STEPS steps before it, which may still get spans.

        Raises:
            RequestError: the receiver did not accept them.
        """
        if not self._sent:
            # A process that was killed may have left the one before without its end.
            self._sent[point.step - 1] = set()
        first = point.step - LATE_STEPS
        self._sent = {step: ids for step, ids in self._sent.items() if step >= first} | {
            point.step: self._sent.get(point.step, set())
        }
        for step in sorted(self._sent.keys() & set(list_steps(self._folder, "spans"))):
            self._send(step, is_over=False)

    def end(self, how: RunEnd) -> None:
        """Send the spans that are stored when the run ends, including those of unfinished steps."""
        for step in list_steps(self._folder, "spans"):
            if self._sent and step >= min(self._sent):
                self._sent.setdefault(step, set())
                self._send(step, is_over=True)

    def _send(self, step: int, *, is_over: bool) -> None:
        at, spans = self._settings, read_attempt_spans(self._folder, [step])
        known = self._sent[step]
        export_traces(spans, [step], at.run, at.name, at.otlp, at.timeout_s, known=known, is_over=is_over)


def make_feeds(settings: SinkSettings, report: Report) -> list[Feed]:
    """Create the one Feed of this process, which sends spans to the OpenTelemetry receiver."""
    return [Feed("OpenTelemetry", lambda: OtlpSink(settings), report, most=MOST_WAITING)]


if __name__ == "__main__":
    run_sinks(make_feeds)
