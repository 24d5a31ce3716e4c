"""Every use of Prefect's private API: pausing between steps, ending on SIGTERM, releasing what ended task runs keep.

`PRIVATE_NAMES` is the register. A Prefect without one of the names runs every flow: the flow run's log says once what works
differently. A test looks for all of them in the installed Prefect.
"""

import asyncio
import contextvars
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from types import FrameType
from typing import Any

from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.exceptions import Pause, TerminationSignal

from rollmill.flows.prefect_integration.flow_run import current_flow_run
from rollmill.flows.prefect_integration.progress import say

SEEN_IN = "3.8.8"
"""The version of Prefect that all of these names were seen in."""


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A name of Prefect's private API that Rollmill uses.

    Attributes:
        module: import path.
        name: attribute of the module, or CLASS.FIELD of a pydantic model in it.
        without: what works differently in a Prefect without the name, and what to do.
    """

    module: str
    name: str
    without: str

    def find(self) -> Any:
        """Return the attribute or field with this name; None, and a line in the log, if the installed Prefect lacks it."""
        owner, _, field = self.name.partition(".")
        try:
            found = getattr(import_module(self.module), owner)
            return found.model_fields[field] if field else found
        except (ImportError, AttributeError, KeyError):
            say(f"this Prefect has no {self.module}.{self.name}, which {SEEN_IN} has: {self.without}")
            return None


REGISTER_SUSPENSION = PrivateName(
    "prefect._flow_run_suspension",
    "register_flow_run_suspension_request",
    "Pause ends the run within a step, and Resume samples again what was unfinished; install another Prefect to pause "
    "between steps",
)
SIGTERM_HANDLER = PrivateName(
    "prefect.utilities.engine",
    "_prefect_sigterm_handler",
    "SIGTERM may interrupt any line of the flow, so that a cancelled run may end only when the worker kills it",
)
SIGTERM_LOCK = PrivateName(
    "prefect.utilities.engine", "_prefect_sigterm_bridge_lock", SIGTERM_HANDLER.without
)
RUN_RESULTS = PrivateName(
    "prefect.context",
    "FlowRunContext.run_results",
    "the flow's memory grows by 3 kB with each task run; set observe.task_runs to events for long runs",
)
TASK_RUN_ASSETS = PrivateName(
    "prefect.context",
    "FlowRunContext.task_run_assets",
    "the flow's memory grows by 0.3 kB with each task run; set observe.task_runs to events for long runs",
)
PRIVATE_NAMES = (REGISTER_SUSPENSION, SIGTERM_HANDLER, SIGTERM_LOCK, RUN_RESULTS, TASK_RUN_ASSETS)


class StepPauses:
    """Keeps a request to pause a flow run until the current step is over.

    Prefect's observer, which waits for events on a separate thread, calls `mark_requested`.

    Args:
        steps: of the run; after the last one there is nothing to pause.
        on_request: called once, on the observer's thread, when the request comes.
    """

    def __init__(self, steps: int, on_request: Callable[[], object]) -> None:
        self._steps, self._on_request = steps, on_request
        self._suspended: State | None = None
        self._due_step = -1

    def mark_requested(self, state: State) -> None:
        """Keep a request to pause; `state` is the flow run's state that Prefect's server accepted for it."""
        is_first, self._suspended = self._suspended is None, state
        if is_first:
            self._on_request()

    def is_due(self, step: int) -> bool:
        """Return True if the run is to pause before `step`; then nothing of the step may begin.

        A step that begins after this returned False is finished first, also if the request comes just then.
        """
        is_due = self._suspended is not None and step < self._steps
        self._due_step = step if is_due else -1
        return is_due

    def before(self, step: int) -> None:
        """End the flow before `step`, with its services, if `is_due` returned True of it; Resume in Prefect starts it again at this step.

        Raises:
            Pause: Prefect leaves the flow run in the state Suspended.
        """
        if self._suspended is not None and step == self._due_step:
            say(f"paused before step {step}: Resume continues from here, on any worker")
            raise Pause(state=self._suspended)


@contextmanager
def pause_between_steps(steps: int) -> Iterator[StepPauses]:
    """Yield a StepPauses for a run of so many steps, which keeps a request to pause the flow run until the step is over.

    Without it, Prefect would end the flow at the next start or end of a task run. Prefect pauses only flow runs of
    deployments.

    Raises:
        RuntimeError: it is used outside of a flow run.
    """
    flow_run_id = current_flow_run().id
    loop, ours = asyncio.get_running_loop(), contextvars.copy_context()

    def report() -> None:
        loop.call_soon_threadsafe(
            say, "pause requested: the run pauses when this step is finished", context=ours
        )

    for each in (RUN_RESULTS, TASK_RUN_ASSETS):
        # Only for the log: `release_finished_tasks` does nothing without them.
        each.find()
    pauses = StepPauses(steps, report)
    register = REGISTER_SUSPENSION.find()
    with register(flow_run_id, pauses) if register else nullcontext():
        yield pauses


@contextmanager
def end_in_order() -> Iterator[None]:
    """Make the first SIGTERM in the block cancel the flow's task, and ignore further ones; for use in a flow's coroutine.

    Prefect's handler raises TerminationSignal wherever the main thread happens to be. A callback of the event loop swallows
    it, and so does code that catches everything, such as a scorer's: then the flow runs until the worker kills it 30 s later.
    In other places it becomes the error of whichever task was running.

    Raises:
        CancelledError: SIGTERM came, and all inside has ended; its cause is a TerminationSignal.
    """
    handler, lock = SIGTERM_HANDLER.find(), SIGTERM_LOCK.find()
    in_main_thread = threading.current_thread() is threading.main_thread()
    task = asyncio.current_task()
    if (
        not handler
        or not lock
        or not task
        or not in_main_thread
        or signal.getsignal(signal.SIGTERM) is not handler
    ):
        yield
        return
    loop, came = asyncio.get_running_loop(), False

    def cancel(number: int, frame: FrameType | None) -> None:
        nonlocal came
        if not came:
            came = True
            loop.call_soon_threadsafe(task.cancel)

    _install_handler(lock, cancel)
    try:
        yield
    except BaseException:
        if came:
            raise asyncio.CancelledError from TerminationSignal(signal.SIGTERM)
        raise
    finally:
        _install_handler(lock, handler)


def _install_handler(lock: Any, handler: Any) -> None:
    # Prefect acknowledges a cancel only while its module's name is bound to the handler of SIGTERM.
    with lock:
        setattr(import_module(SIGTERM_HANDLER.module), SIGTERM_HANDLER.name, handler)
        signal.signal(signal.SIGTERM, handler)


def release_finished_tasks() -> None:
    """Free memory that Prefect would keep for each ended task run until the flow run ends; to be called after each step.

    Prefect keeps the states of results, to find which task run a parameter came from, and assets, which Rollmill's task runs
    do not have. A result that is still referred to keeps its state, since a later task may follow it.
    """
    context = FlowRunContext.get()
    results, assets = getattr(context, "run_results", None), getattr(context, "task_run_assets", None)
    if isinstance(results, dict):
        for key, linked in list(
            results.items()
        ):  # (state, kind of run, weak reference to the result or None)
            reference = linked[-1] if isinstance(linked, tuple) else None
            if reference is None or reference() is None:
                del results[key]
    if isinstance(assets, dict):
        assets.clear()
