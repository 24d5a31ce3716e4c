"""What the phases of a step cost: the figures, and their table of 80 columns."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table

from rollmill.tasks.observe.process_memory import MIB
from rollmill.tasks.observe.usage import SAMPLE_S, Usage

TRAFFIC_ALONE, TOGETHER = "traffic alone", "together"
WIDTH = 80
NOT_LATE = f"never late by {1000 * SAMPLE_S:.0f} ms"


@dataclass(frozen=True, slots=True)
class Attribution:
    """Measured cost of the phases of one step that follow its rollouts.

    Attributes:
        phases: seconds, CPU, event loop lag and memory by phase name, in order; the last is all phases together.
        read_s: seconds of training in which the trainer read the batch's rows; None without a trainer.
        same_batch: True if the batch that was made equals the stored one; None for a run that stores none.
    """

    run: str
    step: int
    n_trajectories: int
    synthetic_traffic: int
    phases: Mapping[str, Usage]
    read_s: float | None
    same_batch: bool | None


def attribution_page(attribution: Attribution) -> RenderableType:
    """Return a page for the terminal: title, table of costs, what held the event loop longest in each phase, and notes."""
    return Group(
        _title(attribution),
        _usages(attribution.phases),
        "",
        _longest(attribution.phases),
        "",
        _notes(attribution),
    )


def _title(attribution: Attribution) -> str:
    traffic = attribution.synthetic_traffic
    during = f", with {traffic} tasks of synthetic traffic" if traffic else ""
    return f"{attribution.run}, step {attribution.step}: {attribution.n_trajectories} trajectories{during}"


def _usages(phases: Mapping[str, Usage]) -> Table:
    table = Table(box=None, pad_edge=False, width=WIDTH)
    table.add_column("phase", no_wrap=True)
    names = ("wall s", "CPU s", "below s", "lag p50", "p99", "max ms", "peak MiB", "grown")
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for name, usage in phases.items():
        seconds = (f"{each:.3f}" for each in (usage.wall_s, usage.cpu_s, usage.below_cpu_s))
        measured = (usage.lag_p50_ms, usage.lag_p99_ms, usage.lag_max_ms)
        lags = ("" if math.isnan(usage.lag_p50_ms) else f"{each:.1f}" for each in measured)
        sizes = f"{usage.rss_peak_bytes / MIB:,.0f}", f"{usage.rss_growth_bytes / MIB:+z,.1f}"
        table.add_row(name, *seconds, *lags, *sizes)
    return table


def _longest(phases: Mapping[str, Usage]) -> Table:
    table = Table(box=None, pad_edge=False, width=WIDTH)
    table.add_column("phase", no_wrap=True)
    table.add_column("held the event loop longest", overflow="fold")
    for name, usage in phases.items():
        is_late = usage.lag_max_ms >= 1000 * SAMPLE_S
        seen = f"{usage.lag_max_ms:.1f} ms: {usage.longest or 'cause not sampled'}"
        table.add_row(name, seen if is_late else NOT_LATE)
    return table


def _notes(attribution: Attribution) -> str:
    notes = ["CPU: this process; below: its workers and the trainer."]
    if attribution.read_s is not None:
        notes.append(f"The trainer read the batch in {attribution.read_s:.3f} s of its training.")
    if attribution.same_batch is not None:
        notes.append(
            "The batch is the stored one."
            if attribution.same_batch
            else "The batch is NOT the stored one: the scorer gave other rewards this time."
        )
    if TRAFFIC_ALONE in attribution.phases:
        notes.append("The traffic ran during all phases, and its CPU is included in theirs.")
    return "\n".join(notes)
