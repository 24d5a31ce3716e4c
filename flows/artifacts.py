"""What the Prefect UI shows of a run beside its task runs: a page with the curves."""

import base64
import re

from prefect.artifacts import acreate_markdown_artifact

from flows.failure import PREFECT_ERRORS
from flows.inspection import held_out, run_view
from flows.plot import plot_run
from flows.progress import say
from tasks.store.layout import RunFolder
from tasks.store.partitions import stored_steps


def _key(name: str) -> str:
    """A name as Prefect allows it: lowercase letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


async def create_run_artifact(folder: RunFolder) -> None:
    """A markdown page of the whole run: held-out table, curves, steps, the line that opens the data set.

    A Prefect server that is gone does not fail a run that is done.
    """
    picture = base64.b64encode(plot_run(folder).read_bytes()).decode()
    evaluations = [
        f"| {each['step']} | {each['reward']:.3f} | {each['greedy_accuracy']:.3f} |"
        for each in held_out(folder).to_dicts()
    ]
    view = run_view(folder)
    dataset = "rollouts" if stored_steps(folder, "rollouts") else "batches"
    markdown = "\n".join(
        [
            f"# {folder.name}",
            "| policy version | held-out reward, sampled | accuracy, greedy |",
            "|---|---|---|",
            *evaluations,
            "",
            f"![curves](data:image/png;base64,{picture})",
            "",
            "```python",
            f'pl.scan_ipc("{folder.absolute}/{dataset}/**/*.arrow", hive_partitioning=True)',
            "```",
            "<details><summary>steps</summary>",
            "",
            *view.markdown(),
            "",
            "</details>",
        ]
    )
    try:
        await acreate_markdown_artifact(markdown, key=_key(folder.name))
    except PREFECT_ERRORS as error:
        say(f"Prefect did not take the run's page: {type(error).__name__}: {error}")
