"""Weights & Biases as a destination of a run's metrics."""

import os
from pathlib import Path

from rollmill.tasks.observe.sinks.metric_sinks import Point, RunEnd, SinkSettings

EXIT_CODES: dict[RunEnd, int] = {"finished": 0, "failed": 1, "killed": 130}
"""Exit codes by which Weights & Biases shows how a run ended."""
WRITTEN = "written-points"
"""File of the points that were logged: without a network, Weights & Biases cannot be asked for them."""


class WandbSink:
    """Writes a run's points to the Weights & Biases run that has the run's id, which is created if there is none.

    Each metric's horizontal axis is `step`, since evaluations and separate points of a step arrive after later steps. The library
    stores points in files before it sends them; a process that is killed between a point and its line in `WRITTEN` logs it twice.
    """

    def __init__(self, settings: SinkSettings) -> None:
        import wandb

        folder = Path(settings.wandb)
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / WRITTEN
        self._written = set(self._path.read_text().splitlines()) if self._path.exists() else set()
        self._run = wandb.init(
            # The variables are the library's own: other programs of a user name project and folder by them too.
            project=os.environ.get("WANDB_PROJECT", "rollmill"),
            name=settings.name,
            id=settings.run,
            resume="allow",
            dir=os.environ.get("WANDB_DIR", str(folder)),
            settings=wandb.Settings(
                silent=True, console="off", disable_code=True, disable_git=True, x_disable_stats=True
            ),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def has(self, marker: str, step: int) -> bool:
        return _line(marker, step) in self._written

    def write(self, point: Point) -> None:
        self._run.log({**point.values, "step": point.step})
        line = _line(point.marker, point.step)
        with self._path.open("a") as file:
            file.write(f"{line}\n")
        self._written.add(line)

    def end(self, how: RunEnd) -> None:
        self._run.finish(exit_code=EXIT_CODES[how])


def _line(marker: str, step: int) -> str:
    return f"{step} {marker}"
