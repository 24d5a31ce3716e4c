"""What the phases of a step took, as a table of 80 columns."""

import math
from collections.abc import Mapping

from rich.console import Group, RenderableType
from rich.table import Table

from flows.replaying.attribution import TRAFFIC_ALONE, Attribution
from tasks.observe.lag_warnings import NOT_SEEN
from tasks.observe.memory import MIB
from tasks.observe.usage import LOOK_AFTER_S, Usage

WIDTH = 80
NOT_LATE = f"no beat was late by {1000 * LOOK_AFTER_S:.0f} ms"


def attribution_page(attribution: Attribution) -> RenderableType:
    """The table, what held the event loop longest in each phase, and what the figures mean."""
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
    beside = f", beside {traffic} tasks of synthetic traffic" if traffic else ""
    return f"{attribution.run}, step {attribution.step}: {attribution.n_trajectories} trajectories{beside}"


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
        sizes = f"{usage.rss_peak_bytes / MIB:,.0f}", f"{usage.rss_growth_bytes / MIB:+,.1f}"
        table.add_row(name, *seconds, *lags, *sizes)
    return table


def _longest(phases: Mapping[str, Usage]) -> Table:
    table = Table(box=None, pad_edge=False, width=WIDTH)
    table.add_column("phase", no_wrap=True)
    table.add_column("held the event loop longest", overflow="fold")
    for name, usage in phases.items():
        is_late = usage.lag_max_ms >= 1000 * LOOK_AFTER_S
        seen = f"{usage.lag_max_ms:.1f} ms: {usage.longest or NOT_SEEN}"
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
            else "The batch is NOT the stored one: the scorer gave other rewards than then."
        )
    if TRAFFIC_ALONE in attribution.phases:
        notes.append("All phases have the traffic beside them, and its CPU is in theirs.")
    return "\n".join(notes)
