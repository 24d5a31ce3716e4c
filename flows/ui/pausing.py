"""Pausing before the next step: Prefect's Pause in the UI, which would otherwise end a run in the middle of one."""

import asyncio
import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prefect._flow_run_suspension import FlowRunSuspensionRequest, register_flow_run_suspension_request
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext

from flows.ui.progress import say


class Pauses(FlowRunSuspensionRequest):
    """What Prefect's observer was told of a wish to pause a flow run; that observer waits for events on its own thread.

    Args:
        steps: of the run; after the last one there is nothing to pause.
        tell: called once, on the observer's thread, when the wish is there.
    """

    def __init__(self, steps: int, tell: Callable[[], object]) -> None:
        super().__init__()
        self._steps, self._tell = steps, tell

    def mark_requested(self, state: State) -> None:
        """Called by Prefect; the state is the one that the server accepted."""
        is_first = not self.is_requested()
        super().mark_requested(state)
        if is_first:
            self._tell()

    def is_due(self, step: int) -> bool:
        """True when the run is to pause before this step, of which nothing is to be begun; it stays so."""
        return self.is_requested() and step < self._steps

    def before(self, step: int) -> None:
        """End the flow here, with its services, if a pause is due; Resume starts it again, and it goes on here.

        Raises:
            Pause: the flow run is to be left in the state Suspended.
        """
        if self.is_due(step):
            say(f"paused before step {step + 1}: Resume goes on from here, on any worker")
            self.raise_if_requested()


@contextmanager
def pauses_between_steps(steps: int) -> Iterator[Pauses]:
    """Keep a wish to pause until `before`, in place of Prefect, which ends the flow at the next start or end of a task.

    Without a deployment Prefect lets nobody pause a flow run. `steps`: of the run.
    """
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("pauses are looked for inside of a flow run")
    loop, ours = asyncio.get_running_loop(), contextvars.copy_context()

    def tell() -> None:
        loop.call_soon_threadsafe(say, "a pause was asked for: this step is finished first", context=ours)

    pauses = Pauses(steps, tell)
    with register_flow_run_suspension_request(context.flow_run.id, pauses):
        yield pauses
