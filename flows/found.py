"""One trajectory of a run, found by its id, with all that other data sets say of it."""

import difflib
import json
import re
from dataclasses import dataclass
from typing import Any

import polars as pl

from flows.scored import scorer_of
from flows.trajectories import short_id, step_of_group
from tasks.errors import ConfigError
from tasks.store.layout import RunFolder
from tasks.store.manifest import read_manifest
from tasks.store.partitions import stored_steps
from tasks.store.reader import scan

NEAR = 5
"""Most ids that an error offers."""
_SAMPLED = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")
_EVALUATED = re.compile(r"v(\d+)\.\d+\.(?:greedy|sampled)")
_JSON = ("messages", "example", "outcome", "components")


@dataclass(frozen=True, slots=True)
class Found:
    """A trajectory and what is said of it.

    Attributes:
        short: its id without the run's.
        row: its rollout, or its held-out trajectory with reward; JSON columns as values.
        scores: one row a scorer, the run's own first; none of a held-out trajectory.
        advantage: None when no batch has it.
        group: its row in `groups`; empty for a held-out trajectory or a group that is not done.
    """

    short: str
    row: dict[str, Any]
    scores: list[dict[str, Any]]
    advantage: float | None
    group: dict[str, Any]

    @property
    def is_held_out(self) -> bool:
        """True for a trajectory of the `evaluations` data set."""
        return "greedy" in self.row

    def values(self) -> dict[str, Any]:
        """All of it, as JSON values."""
        said = {"advantage": self.advantage, "scores": self.scores, "group_row": self.group}
        return {"trajectory": self.short, **self.row, **said}


def find_trajectory(folder: RunFolder, asked: str) -> Found:
    """The trajectory of an id, given with or without the run's: GROUP.SAMPLE, or vVERSION.PROMPT.greedy.

    Raises:
        ConfigError: the run has no such trajectory; names near ones.
    """
    run = read_manifest(folder).run
    short = short_id(asked, run)
    if evaluated := _EVALUATED.fullmatch(short):
        return _held_out(folder, run, short, int(evaluated[1]))
    if sampled := _SAMPLED.fullmatch(short):
        trajectory_id = f"{run}.{sampled[1]}.{sampled[2]}.{sampled[3] or 0}"
        return _found(folder, run, trajectory_id, step_of_group(folder, int(sampled[1])))
    everywhere = scan(folder, "rollouts", ["trajectory_id", "step"]).collect()
    places = dict(everywhere.select("trajectory_id", "step").iter_rows())
    if asked not in places:
        raise _unknown(asked, [short_id(each, run) for each in places])
    return _found(folder, run, asked, places[asked])


def _held_out(folder: RunFolder, run: str, short: str, version: int) -> Found:
    versions = stored_steps(folder, "evaluations")
    if version not in versions:
        raise ConfigError("TRAJECTORY", short, f"evaluated are the versions {', '.join(map(str, versions))}")
    rows = scan(folder, "evaluations", version=version)
    row = _row(rows, run, f"{run}.{short}")
    return Found(short, row, [], None, {})


def _found(folder: RunFolder, run: str, trajectory_id: str, step: int) -> Found:
    row = _row(scan(folder, "rollouts", step=step), run, trajectory_id)
    of_it = pl.col("trajectory_id") == trajectory_id
    scores = scan(folder, "scores", step=step).filter(of_it).sort("scorer", "version").collect().to_dicts()
    for each in scores:
        each["components"] = json.loads(each["components"])
    own = scorer_of(folder)
    scores.sort(key=lambda each: f"{each['scorer']}@{each['version']}" != own)
    batch = scan(folder, "batches", ["trajectory_id", "advantage"], step=step).filter(of_it).collect()
    subgroup = scores[0]["subgroup"] if scores else 0
    of_group = (pl.col("group") == row["group"]) & (pl.col("subgroup") == subgroup)
    group = scan(folder, "groups", step=step).filter(of_group).collect().to_dicts()
    advantage = float(batch["advantage"][0]) if len(batch) else None
    return Found(short_id(trajectory_id, run), row, scores, advantage, group[0] if group else {})


def _row(rows: pl.LazyFrame, run: str, trajectory_id: str) -> dict[str, Any]:
    found = rows.filter(pl.col("trajectory_id") == trajectory_id).collect().to_dicts()
    if not found:
        ids = rows.select("trajectory_id").collect()["trajectory_id"].to_list()
        raise _unknown(short_id(trajectory_id, run), [short_id(each, run) for each in ids])
    row = found[0]
    return row | {name: json.loads(row[name]) for name in _JSON if name in row}


def _unknown(asked: str, known: list[str]) -> ConfigError:
    near = difflib.get_close_matches(asked, known, n=NEAR, cutoff=0.0)
    nearest = f"; near it are {', '.join(sorted(near))}" if near else ""
    form = "give an id of `rollmill inspect RUN --trajectories`, such as 12.3"
    return ConfigError("TRAJECTORY", asked, f"the run has no such trajectory{nearest}; {form}")
