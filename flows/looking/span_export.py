"""A run's spans for other tools, whose libraries may not be installed."""

from pathlib import Path

import polars as pl

from flows.looking.run_ledger import asked_steps, read_attempts, read_spans
from flows.looking.selection import Interval
from flows.looking.view import counted
from tasks.observe.sink_check import check_installed, check_receiver
from tasks.store.layout import RunFolder
from tasks.store.manifest import read_manifest

OTLP_TIMEOUT_S = 30.0
"""Seconds that a receiver may take for a request of `rollmill spans --otlp`."""


def write_perfetto(folder: RunFolder, asked: Interval | None, file: Path) -> str:
    """Write a trace of steps; says in a line what is in it.

    Raises:
        ConfigError: no such step or spans, the library is not installed, or the file cannot be written.
    """
    check_installed("--perfetto", str(file), "perfetto", "perfetto")
    from flows.looking.perfetto_trace import write_trace

    steps = asked_steps(folder, asked)
    spans = read_spans(folder, steps).filter(pl.col("step").is_in(steps))
    n = write_trace(spans, file)
    which = "" if n == len(spans) else f", the last of {len(spans)}"
    return f"{file}: {counted(n, 'span')}{which}; open it at ui.perfetto.dev, which keeps it in the browser"


def send_otlp(folder: RunFolder, asked: Interval | None, endpoint: str) -> str:
    """Send the spans of steps to a receiver; says in a line how many.

    Raises:
        ConfigError: no such step or spans, the library is not installed, or the address holds a password.
        RequestError: the receiver did not take them.
    """
    check_receiver("--otlp", endpoint)
    from flows.looking.otlp_export import export

    steps = asked_steps(folder, asked)
    spans = read_attempts(folder, steps)
    n = export(spans, steps, read_manifest(folder).run, folder.name, endpoint, OTLP_TIMEOUT_S)
    return f"{counted(n, 'span')} sent to {endpoint}"
