"""A run's spans, read and attributed."""

from dataclasses import replace

import polars as pl

from flows.looking.selection import Interval, spans
from tasks.errors import ConfigError
from tasks.observe.ledger.attribution import Ledger, ledger_of
from tasks.observe.ledger.timeline import COLUMNS
from tasks.store.layout import RunFolder
from tasks.store.manifest import read_manifest
from tasks.store.partitions import stored_steps
from tasks.store.reader import scan

MOST_STEPS = 1000
"""Steps that are looked at where none are asked for: the last ones."""


def read_ledger(folder: RunFolder, asked: Interval | None = None) -> Ledger:
    """Where the time of a run went; its start and its end where no steps are asked for.

    Args:
        folder: of the run.
        asked: steps; None: the last MOST_STEPS.

    Raises:
        ConfigError: the run has no spans, or none of these steps; says which there are.
    """
    steps = asked_steps(folder, asked)
    ledger = ledger_of(read_spans(folder, steps), steps)
    return ledger if asked is None else replace(ledger, ends=ledger.ends.clear())


def asked_steps(folder: RunFolder, asked: Interval | None) -> list[int]:
    """The steps of a run that are asked for and have spans; see `read_ledger`."""
    stored = stored_steps(folder, "spans")
    if not stored:
        remedy = (
            "no spans are stored of it: it was made before there were any, or has done no step yet; "
            "`rollmill inspect` shows what is stored"
        )
        raise ConfigError("RUN", folder.location, remedy)
    if asked is None:
        return stored[-MOST_STEPS:]
    if steps := [step for step in stored if step in asked]:
        return steps
    raise ConfigError("--step", f"{asked.low:g}:{asked.high:g}", f"it has spans of steps {spans(stored)}")


def read_spans(folder: RunFolder, steps: list[int]) -> pl.DataFrame:
    """The spans of steps, and of those that go on beside them: the one before, and as many after as may be ahead."""
    config = read_manifest(folder).config
    ahead = int(config.get("rollout", {}).get("max_staleness", 0)) + 1
    wanted = {beside for step in steps for beside in range(step - 1, step + ahead + 1)}
    stored = [step for step in stored_steps(folder, "spans") if step in wanted]
    return pl.concat([scan(folder, "spans", COLUMNS, step=step) for step in stored]).collect()
