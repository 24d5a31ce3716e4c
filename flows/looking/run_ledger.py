"""A run's spans, read and attributed."""

from dataclasses import replace

import polars as pl

from flows.looking.selection import Interval, spans
from tasks.errors import ConfigError
from tasks.observe.ledger.attribution import Ledger, ledger_of
from tasks.observe.ledger.timeline import COLUMNS, FLOW, LINE, WHOLE
from tasks.store.layout import RunFolder
from tasks.store.manifest import read_manifest
from tasks.store.partitions import stored_steps
from tasks.store.reader import scan

MOST_STEPS = 1000
"""Steps that are looked at where none are asked for: the last ones."""


def read_ledger(folder: RunFolder, asked: Interval | None = None, most: int = MOST_STEPS) -> Ledger:
    """Where the time of a run went; its start and its end where no steps are asked for.

    Args:
        folder: of the run.
        asked: steps; None: the last ones, of them those that are over.
        most: steps that are looked at where none are asked for.

    Raises:
        ConfigError: the run has no spans, or none of these steps; says which there are.
    """
    steps = asked_steps(folder, asked)[-most:] if asked is None else asked_steps(folder, asked)
    spans = read_spans(folder, steps)
    if asked is None:
        return ledger_of(spans, over(spans, steps))
    ledger = ledger_of(spans, steps)
    return replace(ledger, ends=ledger.ends.clear())


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


def over(spans: pl.DataFrame, steps: list[int]) -> list[int]:
    """Of these steps those that have come to their end; all where none has, since something is to be seen of them then."""
    is_whole = (pl.col("process") == FLOW) & (pl.col("lane") == LINE) & (pl.col("name") == WHOLE)
    whole = set(spans.filter(is_whole)["step"].to_list())
    return [step for step in steps if step in whole] or steps


def read_spans(folder: RunFolder, steps: list[int]) -> pl.DataFrame:
    """The spans of steps, and of those that go on beside them: the one before, and as many after as may be ahead."""
    return _read_beside(folder, steps, before=1, after=_ahead(folder))


def read_attempts(folder: RunFolder, steps: list[int]) -> pl.DataFrame:
    """The spans of steps, and of those beside them with which a process may have begun that went on after these."""
    return _read_beside(folder, steps, before=_ahead(folder), after=1)


def _ahead(folder: RunFolder) -> int:
    """Steps that may be begun before an open one is over, and one more."""
    return int(read_manifest(folder).config.get("rollout", {}).get("max_staleness", 0)) + 1


def _read_beside(folder: RunFolder, steps: list[int], *, before: int, after: int) -> pl.DataFrame:
    wanted = {beside for step in steps for beside in range(step - before, step + after + 1)}
    stored = [step for step in stored_steps(folder, "spans") if step in wanted]
    return pl.concat([scan(folder, "spans", COLUMNS, step=step) for step in stored]).collect()
