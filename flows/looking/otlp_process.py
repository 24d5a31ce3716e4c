"""The process that sends a run's spans to an OpenTelemetry receiver while it goes on: told of a step, it reads what is stored.

So a run hands over a number a step, and a receiver that is slow or gone holds up nothing of it. See
tasks.observe.sink_process, which it shares its ways with.
"""

from flows.looking.otlp_export import export
from flows.looking.run_ledger import read_attempts
from tasks.observe.sink_process import Feed, Report, serve
from tasks.observe.sinks import End, Point, SinkSettings
from tasks.store.layout import RunFolder
from tasks.store.partitions import stored_steps

LATE_STEPS = 8
"""A step's spans that are stored so many steps later are still sent: a checkpoint is written beside the steps."""
MOST_WAITING = 1000
"""Steps that wait for a receiver; the oldest go."""


class OtlpSink:
    """Sends the spans of a step, and what has come since of those before it; none twice.

    Args:
        settings: which run, and where its spans go.
    """

    def __init__(self, settings: SinkSettings) -> None:
        self._settings, self._folder = settings, RunFolder(settings.folder)
        self._sent: dict[int, set[int]] = {}

    def has(self, marker: str, step: int) -> bool:
        """Never: what was sent is known by span, not by step."""
        return False

    def write(self, point: Point) -> None:
        """Send what is stored of a step and of those before it.

        Raises:
            RequestError: the receiver did not take it.
        """
        if not self._sent:  # a process that was killed may have left the one before without its end
            self._sent[point.step - 1] = set()
        first = point.step - LATE_STEPS
        self._sent = {step: ids for step, ids in self._sent.items() if step >= first} | {
            point.step: self._sent.get(point.step, set())
        }
        for step in sorted(self._sent.keys() & set(stored_steps(self._folder, "spans"))):
            self._send(step, is_over=False)

    def end(self, how: End) -> None:
        """Send what was stored at the run's end, of steps that were begun and not done too."""
        for step in stored_steps(self._folder, "spans"):
            if self._sent and step >= min(self._sent):
                self._sent.setdefault(step, set())
                self._send(step, is_over=True)

    def _send(self, step: int, *, is_over: bool) -> None:
        at, spans = self._settings, read_attempts(self._folder, [step])
        known = self._sent[step]
        export(spans, [step], at.run, at.name, at.otlp, at.timeout_s, known=known, is_over=is_over)


def feeds_of(settings: SinkSettings, report: Report) -> list[Feed]:
    """The one feed of this process."""
    return [Feed("OpenTelemetry", lambda: OtlpSink(settings), report, most=MOST_WAITING)]


if __name__ == "__main__":
    serve(feeds_of)
