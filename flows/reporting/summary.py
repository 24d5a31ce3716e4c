"""What the terminal shows when a run is over."""

from rich.console import Console
from rich.table import Table

from flows.looking.inspection import held_out
from tasks.store.layout import RunFolder
from tasks.store.partitions import stored_steps


def print_summary(folder: RunFolder, run_url: str) -> None:
    """Before and after, the picture, the line that opens the data set, the link to the run."""
    from flows.looking.plot import plot_run  # a flow imports no matplotlib before it draws

    console = Console()
    evaluations = held_out(folder).to_dicts()
    if evaluations:
        console.print(_before_and_after(evaluations[0], evaluations[-1]))
    dataset = "rollouts" if stored_steps(folder, "rollouts") else "batches"
    lines = {
        "curves": str(plot_run(folder)),
        "data set": f'pl.scan_ipc("{folder.location}/{dataset}/**/*.arrow", hive_partitioning=True)',
        "the run in the UI": run_url,
    }
    for name, value in lines.items():
        console.print(f"[bold]{name}[/bold]", highlight=False)
        console.print(f"  {value}", highlight=False, soft_wrap=True, markup=False)


def _before_and_after(before: dict[str, object], after: dict[str, object]) -> Table:
    table = Table(title="held-out problems", title_justify="left")
    for column in ("", "before", "after"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row("policy version", str(before["step"]), str(after["step"]))
    for name, key in (("reward, sampled", "reward"), ("accuracy, greedy", "greedy_accuracy")):
        table.add_row(name, f"{before[key]:.3f}", f"{after[key]:.3f}")
    return table
