"""What the Prefect UI shows of a run beside its task runs: progress, and a page with the curves."""

import base64
import re
from uuid import UUID

from prefect.artifacts import acreate_markdown_artifact, acreate_progress_artifact, aupdate_progress_artifact

from flows.inspection import held_out, run_view
from flows.plot import plot_learning_curve
from tasks.store.layout import RunFolder


def _key(name: str) -> str:
    """A name as Prefect allows it: lowercase letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


class ProgressArtifact:
    """One progress bar in the UI; made at the first step, updated at every other."""

    def __init__(self, name: str, steps: int) -> None:
        self._name, self._steps = name, steps
        self._id: UUID | None = None

    async def show(self, steps_done: int) -> None:
        """Set the bar."""
        percent = 100.0 * steps_done / self._steps
        if self._id is None:
            made = await acreate_progress_artifact(
                percent, key=_key(f"{self._name}-progress"), description="steps done"
            )
            self._id = made
        else:
            await aupdate_progress_artifact(self._id, percent)


async def create_run_artifact(folder: RunFolder) -> None:
    """A markdown page of the whole run: held-out table, learning curve, steps, the line that opens the data set."""
    picture = base64.b64encode(plot_learning_curve(folder).read_bytes()).decode()
    evaluations = [
        f"| {each['step']} | {each['reward']:.3f} | {each['greedy_accuracy']:.3f} |"
        for each in held_out(folder)
    ]
    view = run_view(folder)
    steps = [f"| {' | '.join(view.cells(row))} |" for row in view.rows]
    markdown = "\n".join(
        [
            f"# {folder.root.name}",
            "| policy version | held-out reward, sampled | accuracy, greedy |",
            "|---|---|---|",
            *evaluations,
            "",
            f"![learning curve](data:image/png;base64,{picture})",
            "",
            "```python",
            f'pl.scan_ipc("{folder.root.absolute()}/rollouts/**/*.arrow", hive_partitioning=True)',
            "```",
            "<details><summary>steps</summary>",
            "",
            f"| {' | '.join(view.columns)} |",
            f"|{'---|' * len(view.columns)}",
            *steps,
            "",
            "</details>",
        ]
    )
    await acreate_markdown_artifact(markdown, key=_key(folder.root.name))
