"""Progress on the terminal: a bar, or one line per step without a terminal; and lines in the flow run's log."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from prefect.logging.handlers import PrefectConsoleHandler
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from rollmill.flows.prefect_integration.flow_run import run_logger
from rollmill.tasks.errors import mask_credentials
from rollmill.tasks.look.tables.view import escape_controls

CONSOLE = Console(stderr=True)
LEVEL_OF_TASK_RUNS = "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL"


def say(text: str) -> None:
    """Write a line to the flow run's log and to the terminal, above a progress bar.

    If Prefect writes the log to the terminal too, as in a worker, the line is printed once.
    """
    text = escape_controls(mask_credentials(text))
    if not logs_to_terminal():
        CONSOLE.print(text, highlight=False, soft_wrap=True, markup=False)
    run_logger().info(text)


def logs_to_terminal() -> bool:
    """Return True if Prefect writes the log of flow runs to this process's terminal."""
    # Handlers of the loggers above count too.
    named = logging.getLogger("prefect.flow_runs")
    if not named.isEnabledFor(logging.INFO):
        return False
    logger: logging.Logger | None = named
    while logger is not None:
        if any(
            isinstance(each, PrefectConsoleHandler) and each.level <= logging.INFO for each in logger.handlers
        ):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def quiet_task_runs() -> None:
    """Turn off Prefect's log line for the end of each task run, unless the user has set the level of that log.

    A run has thousands of task runs.
    """
    if LEVEL_OF_TASK_RUNS not in os.environ:
        logging.getLogger("prefect.task_runs").setLevel(logging.WARNING)


def has_bar() -> bool:
    """Return True if a progress bar can be shown: in a terminal to which Prefect does not write its log."""
    return CONSOLE.is_terminal and not logs_to_terminal()


class RunProgress:
    """Shows the step, reward, tokens per second and time left of a run in a progress bar; a context manager.

    Args:
        name: of the run.
        steps: of the run.
        is_shown: False to show nothing.
    """

    def __init__(self, name: str, steps: int, *, is_shown: bool = True) -> None:
        self._steps, self._is_shown = steps, is_shown
        self._bar = _make_bar(TextColumn("{task.fields[figures]}"))
        self._task: TaskID = self._bar.add_task(name, total=steps, figures="")

    def __enter__(self) -> "RunProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def begin(self, step: int) -> None:
        """Show the progress bar, with the steps before `step` done."""
        self._bar.update(self._task, completed=step)
        if self._is_shown and has_bar():
            self._bar.start()

    def step_done(
        self, step: int, *, reward: float, tokens_per_s: float, seconds: float, dropped: str
    ) -> None:
        """Show a finished step in the progress bar, or as a line, and in the log; `dropped`: lost trajectories, in words."""
        if not self._is_shown:
            return
        # Of an imported step, or one that another process has sampled, none is of this one.
        speed = f", {tokens_per_s:,.0f} tok/s" if tokens_per_s else ""
        figures = f"reward {reward:z.2f}{speed}"
        line = f"step {step} ({step + 1} of {self._steps}): {figures}, {seconds:.1f} s{dropped and f', {dropped}'}"
        self._bar.update(self._task, completed=step + 1, figures=figures)
        if not has_bar():
            say(line)
            return
        run_logger().info(line)
        if step + 1 == self._steps:
            self._stop()

    def _stop(self) -> None:
        # Without a live bar, rich would end a line that was not begun.
        if self._bar.live.is_started:
            self._bar.stop()


@contextmanager
def count_progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show in a progress bar how many of `total` items are done, and the time left; nothing without a terminal.

    Yields:
        A function that shows that many more items as done.
    """
    with _make_bar(disable=not has_bar()) as bar:
        task = bar.add_task(name, total=total)
        yield partial(bar.advance, task)


def _make_bar(*columns: ProgressColumn, disable: bool = False) -> Progress:
    """Make a progress bar with a name, a count and the time left; `columns` are shown before the time."""
    return Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        *columns,
        TimeRemainingColumn(compact=True),
        console=CONSOLE,
        expand=True,
        disable=disable,
    )
