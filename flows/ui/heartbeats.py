"""Signs of life of the flow runs of steps, by which the automation that marks lost runs as crashed knows them."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import Flow
from prefect.client.schemas.objects import FlowRun
from prefect.events import emit_event
from prefect.settings import get_current_settings

HEARTBEAT = "prefect.flow-run.heartbeat"
"""What Prefect's engine emits of a flow run that it runs; nobody does of one that was made through the API."""


@contextmanager
def heartbeats(flow: Flow[Any, Any], flow_run: FlowRun) -> Iterator[None]:
    """Inside, a flow run has a heartbeat every PREFECT_FLOWS_HEARTBEAT_FREQUENCY seconds; needs a running event loop."""
    every_s, loop = get_current_settings().flows.heartbeat_frequency, asyncio.get_running_loop()
    if every_s is None:
        yield
        return
    resource = {
        "prefect.resource.id": f"prefect.flow-run.{flow_run.id}",
        "prefect.resource.name": flow_run.name,
    }
    related = [
        {
            "prefect.resource.id": f"prefect.flow.{flow_run.flow_id}",
            "prefect.resource.role": "flow",
            "prefect.resource.name": flow.name,
        }
    ]
    timer: asyncio.TimerHandle | None = None

    def beat() -> None:
        nonlocal timer
        emit_event(HEARTBEAT, resource=resource, related=related)  # a queue takes it; nothing is waited for
        timer = loop.call_later(every_s, beat)

    beat()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()
