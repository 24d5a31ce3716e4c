"""Read a run's spans and attribute their time."""

from dataclasses import replace

import polars as pl

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.ledger.span_timeline import COLUMNS, FLOW, LINE, WHOLE
from rollmill.tasks.look.ledger.step_attribution import Ledger, build_ledger
from rollmill.tasks.look.tables.selection import Interval, format_ranges
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_steps, scan
from rollmill.tasks.store.run.manifest import read_manifest

MOST_STEPS = 1000
"""Number of last steps to attribute by default."""


def read_ledger(folder: RunFolder, asked: Interval | None = None, most: int = MOST_STEPS) -> Ledger:
    """Read a run's spans and compute where the time of its steps went.

    Without `asked` these are the last `most` finished ones, and the run's start and end are included.

    Raises:
        ConfigError: the run has no spans of these steps; the error lists the steps it has.
    """
    steps = select_steps(folder, asked)
    steps = steps[-most:] if asked is None else steps
    spans = read_step_spans(folder, steps)
    if asked is None:
        return build_ledger(spans, select_finished(spans, steps))
    # The spans of some steps have a part of the run's start and end, if any.
    ledger = build_ledger(spans, steps)
    return replace(ledger, ends=ledger.ends.clear())


def select_steps(folder: RunFolder, asked: Interval | None) -> list[int]:
    """Return the steps in `asked` that have spans, or the last MOST_STEPS if `asked` is None; ConfigError if there are none."""
    stored = list_steps(folder, "spans")
    if not stored:
        remedy = (
            "it has no stored spans: it was made by an earlier version, or has not finished a step; "
            "`rollmill inspect` shows what is stored"
        )
        raise ConfigError("RUN", folder.location, remedy)
    if asked is None:
        return stored[-MOST_STEPS:]
    if steps := [step for step in stored if step in asked]:
        return steps
    raise ConfigError(
        "--step", f"{asked.low:g}:{asked.high:g}", f"it has spans of steps {format_ranges(stored)}"
    )


def select_finished(spans: pl.DataFrame, steps: list[int]) -> list[int]:
    """Return those of `steps` that have ended by their spans; all of them if none has ended."""
    is_whole = (pl.col("process") == FLOW) & (pl.col("lane") == LINE) & (pl.col("name") == WHOLE)
    whole = set(spans.filter(is_whole)["step"].to_list())
    return [step for step in steps if step in whole] or steps


def read_step_spans(folder: RunFolder, steps: list[int]) -> pl.DataFrame:
    """Read the spans of steps, of the steps before them, and of as many later ones as may run ahead."""
    return _read_with_neighbours(folder, steps, before=1, after=_steps_ahead(folder))


def read_attempt_spans(folder: RunFolder, steps: list[int]) -> pl.DataFrame:
    """Read the spans of steps and of their neighbours, which show when the flow processes of the run began."""
    return _read_with_neighbours(folder, steps, before=_steps_ahead(folder), after=1)


def _steps_ahead(folder: RunFolder) -> int:
    """Return how many later steps may begin before a step ends, plus one: the run's `rollout.max_staleness` + 1."""
    return int(read_manifest(folder).config.get("rollout", {}).get("max_staleness", 0)) + 1


def _read_with_neighbours(folder: RunFolder, steps: list[int], *, before: int, after: int) -> pl.DataFrame:
    wanted = {near for step in steps for near in range(step - before, step + after + 1)}
    stored = [step for step in list_steps(folder, "spans") if step in wanted]
    return pl.concat([scan(folder, "spans", COLUMNS, step=step) for step in stored]).collect()
