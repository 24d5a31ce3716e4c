"""Send a run's spans to an OpenTelemetry receiver, for `rollmill spans --otlp`."""

from rollmill.tasks.look.ledger.run_ledger import read_attempt_spans, select_steps
from rollmill.tasks.look.tables.selection import Interval
from rollmill.tasks.look.tables.view import count_noun
from rollmill.tasks.observe.sinks.sink_check import check_receiver
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.run.manifest import read_manifest

OTLP_TIMEOUT_S = 30.0
"""Timeout in seconds for each request to the receiver."""


def send_otlp(folder: RunFolder, asked: Interval | None, endpoint: str) -> str:
    """Send the spans of the steps `asked`, or of the last ones, to a receiver; return a line with the number of spans sent.

    Raises:
        ConfigError: no such step or spans, the library is not installed, or the address contains a password.
        RequestError: the receiver did not accept them.
    """
    check_receiver("--otlp", endpoint)
    from rollmill.tasks.look.export.otlp_export import export_traces

    steps = select_steps(folder, asked)
    spans = read_attempt_spans(folder, steps)
    n = export_traces(spans, steps, read_manifest(folder).run, folder.name, endpoint, OTLP_TIMEOUT_S)
    return f"{count_noun(n, 'span')} sent to {endpoint}"
