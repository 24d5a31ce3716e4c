"""What a person in front of a terminal sees of a run: a bar, or a line a step where there is no terminal."""

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class RunProgress:
    """Shows step, reward, tokens a second and time left; notes appear above the bar."""

    def __init__(self, name: str, steps: int) -> None:
        self._console = Console(stderr=True)
        self._name, self._steps = name, steps
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            expand=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> "RunProgress":
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        """One line above the bar."""
        self._console.print(text, highlight=False, soft_wrap=True)

    def step_done(self, step: int, *, reward: float, tokens_per_s: float, seconds: float) -> None:
        """Show that a step is over."""
        figures = f"reward {reward:.2f} {tokens_per_s:,.0f} tok/s"
        if not self._console.is_terminal:
            self.note(f"step {step + 1}/{self._steps}: {figures}, {seconds:.1f} s")
            return
        if self._task is None:
            self._task = self._bar.add_task(self._name, total=self._steps, completed=step, figures=figures)
        self._bar.update(self._task, completed=step + 1, figures=figures)
