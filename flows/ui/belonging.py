"""To which flow run task runs and log lines belong: that of the run, or that of one of its steps."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

from prefect import Flow
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from prefect.logging.loggers import flow_run_logger

Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]


class StepContext(FlowRunContext):
    """The context of a step's flow run, inside of that of the run.

    Attributes:
        run: the context of the run's flow run.
    """

    run: FlowRunContext


@contextmanager
def belonging_to(flow: Flow[Any, Any], flow_run: FlowRun) -> Iterator[None]:
    """Inside, task runs begun, their logs and events belong to this flow run, and no longer to that of the run."""
    run = run_context()
    own: dict[str, Any] = {
        "flow": flow,
        "flow_run": flow_run,
        "run": run,
        "task_run_dynamic_keys": {},
        "run_results": {},
    }
    shared: dict[str, Any] = {
        name: getattr(run, name) for name in FlowRunContext.model_fields if name not in own
    }
    with StepContext.model_construct(**shared, **own):
        yield


def run_context() -> FlowRunContext:
    """The context of the run's flow run, from inside of a step's too.

    Raises:
        RuntimeError: this is not inside of a flow run.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("this is done inside of a flow run")
    return context.run if isinstance(context, StepContext) else context


def run_flow_run() -> FlowRun:
    """The run's flow run; RuntimeError outside of one."""
    flow_run = run_context().flow_run
    assert flow_run is not None
    return flow_run


def run_logger() -> Logger:
    """The log of the run's flow run, from inside of a step's and of task runs too."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return get_run_logger()  # says what is missing
    return flow_run_logger(run_flow_run(), run_context().flow)


def own_and_steps(flow_run_id: UUID) -> dict[str, object]:
    """Prefect's filter of flow runs for a run's flow run and those of its steps."""
    ids = {"any_": [str(flow_run_id)]}
    return {"operator": "or_", "id": ids, "parent_flow_run_id": ids}
