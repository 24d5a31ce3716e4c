"""What a person in front of a terminal sees of a run: a bar, or a line a step where there is no terminal."""

import logging
import os
from types import TracebackType

from prefect.logging.handlers import PrefectConsoleHandler
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from flows.looking.view import visible
from flows.ui.belonging import run_logger
from tasks.errors import masked

CONSOLE = Console(stderr=True)
LEVEL_OF_TASK_RUNS = "PREFECT_LOGGING_LOGGERS_PREFECT_TASK_RUNS_LEVEL"


def say(text: str) -> None:
    """One line: in the flow run's log, and on the terminal, above the bar when there is one.

    Where Prefect writes the log to the terminal too, as a worker does, that is the line on the terminal.
    """
    text = visible(masked(text))
    if not logs_to_terminal():
        CONSOLE.print(text, highlight=False, soft_wrap=True, markup=False)
    run_logger().info(text)


def logs_to_terminal() -> bool:
    """True when Prefect writes the log of flow runs to this process's terminal too."""
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
    """Leave out of the log that each of thousands of task runs has ended, unless a level was set for it."""
    if LEVEL_OF_TASK_RUNS not in os.environ:
        logging.getLogger("prefect.task_runs").setLevel(logging.WARNING)


def has_bar() -> bool:
    """True where a bar can be shown: in a terminal that Prefect writes nothing to."""
    return CONSOLE.is_terminal and not logs_to_terminal()


class RunProgress:
    """Shows step, reward, tokens a second and time left, from the first step to the last or to an error.

    Args:
        name: of the run.
        steps: that it has.
        is_shown: False where nobody is to see of them, since they were sampled before.
    """

    def __init__(self, name: str, steps: int, *, is_shown: bool = True) -> None:
        self._steps, self._is_shown = steps, is_shown
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=CONSOLE,
            expand=True,
        )
        self._task: TaskID = self._bar.add_task(name, total=steps, figures="")

    def __enter__(self) -> "RunProgress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def begin(self, step: int) -> None:
        """Show the bar, standing at the step that is worked on first."""
        self._bar.update(self._task, completed=step)
        if self._is_shown and has_bar():
            self._bar.start()

    def step_done(
        self, step: int, *, reward: float, tokens_per_s: float, seconds: float, dropped: str
    ) -> None:
        """Show that a step is over; `dropped`: what was lost of it, in words, empty for nothing."""
        if not self._is_shown:
            return
        figures = f"reward {reward:.2f} {tokens_per_s:,.0f} tok/s"
        line = f"step {step + 1}/{self._steps}: {figures}, {seconds:.1f} s{dropped and f', {dropped}'}"
        self._bar.update(self._task, completed=step + 1, figures=figures)
        if not has_bar():
            say(line)
            return
        run_logger().info(line)
        if step + 1 == self._steps:
            self._stop()

    def _stop(self) -> None:
        if self._bar.live.is_started:  # else rich ends a line that was not begun
            self._bar.stop()


class CountProgress:
    """Shows how many of a known number of things are done, and the time left; nothing where there is no terminal."""

    def __init__(self, name: str, total: int) -> None:
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            console=CONSOLE,
            expand=True,
            disable=not has_bar(),
        )
        self._task: TaskID = self._bar.add_task(name, total=total)

    def __enter__(self) -> "CountProgress":
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, n: int) -> None:
        """Show that so many more are done."""
        self._bar.advance(self._task, n)
