"""The flow run that this code is part of."""

import logging
from uuid import UUID

from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.logging.loggers import flow_run_logger

Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]


def current_flow_run() -> FlowRun:
    """Return Prefect's current flow run, also from inside its task runs; RuntimeError outside of a flow run."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("this must be called in a flow run")
    return context.flow_run


def run_logger() -> Logger:
    """Return the logger of the current flow run, also from inside its task runs, whose own loggers begin at WARNING."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        # Prefect's exception for this is raised, unless it is disabled.
        return get_run_logger()
    return flow_run_logger(context.flow_run, context.flow)


def in_flow_run(flow_run_id: UUID) -> dict[str, object]:
    """Return Prefect's filter that selects one flow run, for requests about its task runs."""
    return {"id": {"any_": [str(flow_run_id)]}}
