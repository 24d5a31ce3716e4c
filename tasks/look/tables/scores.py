"""The scorers of a run: the default one, and totals for each."""

import math
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_scorers, list_steps, read, scan
from rollmill.tasks.store.run.manifest import read_manifest


def resolve_scorer(folder: RunFolder, asked: str = "") -> str | None:
    """Return the NAME@VERSION to show: `asked`, or by default the scorer that the run trains on; None without scores.

    Raises:
        ConfigError: the run has no such scorer, or has several and does not say which one it trains on.
    """
    known = list_scorers(folder)
    if asked:
        if asked not in known:
            raise ConfigError(
                "--scorer",
                asked,
                f"the run has scores of {', '.join(known)}" if known else "the run has no scores yet",
            )
        return asked
    if len(known) < 2:
        return known[0] if known else None
    own = _find_trained_scorer(folder)
    if own in known:
        return own
    # The recorded version may have no scores yet.
    name = own.rpartition("@")[0] or own
    found = [key for key in known if key.rpartition("@")[0] == name]
    if not found:
        raise ConfigError("--scorer", "", f"the run has scores of {', '.join(known)}; name one")
    # Of several versions the last one trains; the earlier ones scored steps before it was changed.
    return found[-1]


def list_scorers_by_step(folder: RunFolder, own: str) -> list[tuple[str, range]]:
    """List by which scorer, NAME@VERSION, a run trains which of its steps: in a fork those of copied steps, then its `own`.

    Example: a run that is forked at step 20 with another scorer has [("long@1", range(0, 20)), ("short@1", range(20, ...))].
    """
    found, first = list[tuple[str, range]](), 0
    for origin in read_manifest(folder).origins:
        found.append(
            (_find_batch_scorer(folder, range(first, origin.step)) or own, range(first, origin.step))
        )
        first = origin.step
    return [*found, (own, range(first, sys.maxsize))]


def _find_batch_scorer(folder: RunFolder, steps: range) -> str:
    """Return the scorer of the newest batch with rows of some steps; empty without one."""
    for step in reversed(list_steps(folder, "batches")):
        if step in steps:
            batch = read(folder, "batches", ["scorer"], step=step)
            if batch.num_rows:
                return str(batch["scorer"][0].as_py())
    return ""


def _find_trained_scorer(folder: RunFolder) -> str:
    """Return the scorer of the newest batch with rows; without a batch the recorded one, or its name from the settings."""
    if scorer := _find_batch_scorer(folder, range(sys.maxsize)):
        return scorer
    manifest = read_manifest(folder)
    if manifest.scorer:
        return manifest.scorer
    # A scorer that is given by its import path, package.module:name, is stored with dots.
    scorer = manifest.config.get("score", {}).get("scorer", "")
    return str(scorer.get("name", "") if isinstance(scorer, dict) else scorer).replace(":", ".")


def explain_scorers(folder: RunFolder, *keys: str) -> list[str]:
    """Say what the versions of a run's scorers, NAME@VERSION, are digests of, by run.json; all of them without `keys`."""
    recorded = read_manifest(folder).scorers
    return explain_keys({key: recorded.get(key, "") for key in keys or list_scorers(folder)})


def explain_keys(descriptions: Mapping[str, str]) -> list[str]:
    """Return a line for each scorer with a description. Example: 'rewards.short@1-5feceb66 is rewards:short {"limit": 50}'."""
    return [f"{key} is {description}" for key, description in descriptions.items() if description]


@dataclass(frozen=True, slots=True)
class ScoreTotals:
    """Number of scores by one scorer, NAME@VERSION, of each status (scored, failed, dropped); mean reward, NaN without any."""

    scorer: str
    by_status: Counter[str]
    reward: float


def read_score_totals(folder: RunFolder) -> list[ScoreTotals]:
    """Count the scores and average the rewards of each scorer of a run; ordered by scorer."""
    found = []
    for scorer in list_scorers(folder):
        rows = scan(folder, "scores", ["status", "reward"], scorer=scorer).collect()
        by_status = Counter(dict(rows["status"].value_counts().iter_rows()))
        mean = rows.select(pl.col("reward").drop_nans().mean()).item()
        found.append(ScoreTotals(scorer, by_status, math.nan if mean is None else mean))
    return found
