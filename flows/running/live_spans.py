"""A run's spans on their way to an OpenTelemetry receiver, step by step."""

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from flows.ui.progress import say
from tasks.observe.config import ObserveConfig
from tasks.observe.sink_client import SinkClient
from tasks.observe.sinks import Point, SinkSettings
from tasks.store.run import OpenRun

PROCESS = (sys.executable, "-m", "flows.looking.otlp_process")
REMEDY = (
    "the run goes on without; what it lacks is sent when it answers again, and all of it is in the data set `spans`, to be "
    "sent by `rollmill spans RUN --otlp`"
)


@asynccontextmanager
async def sending_spans(
    config: ObserveConfig, store: OpenRun, warn: Callable[[str], None] = say
) -> AsyncIterator[None]:
    """Have each step's spans sent once they are stored, and the last ones at the end; to be left after the run's writer.

    Args:
        config: names the receiver, or none.
        store: the run.
        warn: tells people something once.
    """
    if not config.otlp_endpoint:
        yield
        return
    settings = SinkSettings(
        run=store.manifest.run,
        name=store.folder.name,
        folder=store.folder.location,
        otlp=config.otlp_endpoint,
        timeout_s=config.sink_timeout_s,
    )
    async with SinkClient(settings, warn, PROCESS, REMEDY) as sink:
        store.spans.tell = lambda step: sink.put(Point("spans", step, {}))
        yield
