"""Find one trajectory of a run by its id, with everything the data sets hold about it."""

import difflib
import json
import re
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.scores import resolve_scorer
from rollmill.tasks.look.tables.trajectory_table import check_has_rollouts, describe_groups, find_step
from rollmill.tasks.store.attempts import short_id
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_steps, scan

NEAR = 5
"""Most ids that an error suggests."""
_SAMPLED = re.compile(r"(\d+)\.(\d{1,9})(?:\.(\d{1,9}))?")
_EVALUATED = re.compile(r"v(\d+)\.\d+\.(?:greedy|sampled\d*)")
ANNOTATED = ("logprobs", "entropy", "ratio", "clipped")
_JSON_COLUMNS = ("messages", "example", "outcome", "components")


@dataclass(frozen=True, slots=True)
class TrajectoryRecord:
    """A trajectory with everything that is stored about it.

    Attributes:
        short: id of the trajectory without the run's id.
        row: row of the trajectory in `rollouts`, or in `evaluations` with its reward; JSON columns as parsed values.
        scores: one row for each scorer, the run's own first; empty for a held-out trajectory.
        advantage: None if no batch contains it; the mean over its sampled tokens where these have different ones.
        token_advantages: [T] of each token, None where it was not sampled; empty if no batch contains it.
        group: row of its group in `groups`; empty for a held-out trajectory or an unfinished group.
        annotations: the trainer's values for its tokens, by column; empty without annotations.
    """

    short: str
    row: dict[str, Any]
    scores: list[dict[str, Any]]
    advantage: float | None
    group: dict[str, Any]
    annotations: dict[str, list[Any]] = field(default_factory=dict)
    token_advantages: list[float | None] = field(default_factory=list)

    @property
    def turn_advantages(self) -> list[float | None]:
        """[turns] mean advantage of each turn's tokens, None without any; empty if all sampled tokens have the same one."""
        by_token = self.token_advantages
        if len({each for each in by_token if each is not None}) < 2:
            return []
        of_turns = [
            [each for each in by_token[start : start + n] if each is not None]
            for start, n in zip(self.row["turn_starts"], self.row["turn_tokens"], strict=True)
        ]
        return [sum(each) / len(each) if each else None for each in of_turns]

    @property
    def is_held_out(self) -> bool:
        """True for a trajectory of the `evaluations` data set."""
        return "greedy" in self.row

    def values(self) -> dict[str, Any]:
        """Return the stored row, scores, advantage, group and annotations of the trajectory as one JSON object."""
        said = {
            "advantage": self.advantage,
            "token_advantages": self.token_advantages,
            "scores": self.scores,
            "group_row": self.group,
            "annotations": self.annotations,
        }
        return {"trajectory": self.short, **self.row, **said}


def find_trajectory(folder: RunFolder, asked: str) -> TrajectoryRecord:
    """Find a trajectory by its id, with or without the run's id: GROUP.SAMPLE, or vVERSION.PROMPT.greedy.

    An id without the run's id also finds the trajectories of a fork's first steps, whose ids contain the id of the run that
    generated them.

    Raises:
        ConfigError: the run has no such trajectory; the error lists similar ids, or the groups.
    """
    is_short = _SAMPLED.fullmatch(asked) or _EVALUATED.fullmatch(asked)
    short = asked if is_short else short_id(asked)
    ends = "" if is_short else asked
    if evaluated := _EVALUATED.fullmatch(short):
        version, versions = int(evaluated[1]), list_steps(folder, "evaluations")
        if version not in versions:
            there_are = f"the versions {', '.join(map(str, versions))}" if versions else "none yet"
            raise ConfigError("TRAJECTORY", short, f"evaluated are {there_are}")
        is_it = pl.col("trajectory_id").str.ends_with(ends or f".{short}")
        row = _read_row(folder, scan(folder, "evaluations", version=version), short, is_it)
        return TrajectoryRecord(short, row, [], None, {})
    check_has_rollouts(folder)
    sampled = _SAMPLED.fullmatch(short)
    if sampled is None:
        everywhere = scan(folder, "rollouts", ["trajectory_id"]).collect()["trajectory_id"]
        raise _unknown_error(folder, asked, everywhere.to_list())
    group, sample, attempt = (int(each or 0) for each in sampled.groups())
    columns = {"group": group, "sample": sample, "attempt": attempt}
    # By number, and not by id: the first steps of a fork have ids that begin with another run's.
    is_it = pl.all_horizontal(pl.col(name) == value for name, value in columns.items())
    try:
        step = find_step(folder, group)
    except ConfigError as error:
        raise ConfigError("TRAJECTORY", asked, error.remedy) from error
    return _find_sampled(folder, short, step, is_it & pl.col("trajectory_id").str.ends_with(ends))


def _find_sampled(folder: RunFolder, short: str, step: int, is_it: pl.Expr) -> TrajectoryRecord:
    row = _read_row(folder, scan(folder, "rollouts", step=step), short, is_it)
    of_it = pl.col("trajectory_id") == row["trajectory_id"]
    scores = scan(folder, "scores", step=step).filter(of_it).sort("scorer", "version").collect().to_dicts()
    for each in scores:
        each["components"] = json.loads(each["components"])
    own = resolve_scorer(folder)
    scores.sort(key=lambda each: f"{each['scorer']}@{each['version']}" != own)
    trained = scan(folder, "batches", ["trajectory_id", "advantage", "token_advantages"], step=step)
    batch = trained.filter(of_it).collect().to_dicts()
    # A group whose trajectories are scored in parts has a row of each; the run's own scorer decides which.
    subgroup = scores[0]["subgroup"] if scores else 0
    of_group = scan(folder, "groups", step=step).filter(pl.col("group") == row["group"])
    # One that has no score is of no part: then the first.
    group = of_group.sort(pl.col("subgroup") != subgroup, "subgroup").collect().to_dicts()
    annotated = scan(folder, "annotations", ["trajectory_id", *ANNOTATED], step=step).filter(of_it).collect()
    annotations = annotated.drop("trajectory_id").to_dicts()
    return TrajectoryRecord(
        short=short_id(row["trajectory_id"]),
        row=row,
        scores=scores,
        advantage=batch[0]["advantage"] if batch else None,
        group=group[0] if group else {},
        annotations=annotations[0] if annotations else {},
        token_advantages=_by_token(row["loss_mask"], **batch[0]) if batch else [],
    )


def _by_token(
    loss_mask: list[bool], *, advantage: float, token_advantages: list[float], **_: object
) -> list[float | None]:
    sampled = iter(token_advantages or [advantage] * sum(loss_mask))
    return [next(sampled) if is_sampled else None for is_sampled in loss_mask]


def _read_row(folder: RunFolder, rows: pl.LazyFrame, short: str, is_it: pl.Expr) -> dict[str, Any]:
    found = rows.filter(is_it).collect().to_dicts()
    if not found:
        ids = rows.select("trajectory_id").collect()["trajectory_id"].to_list()
        raise _unknown_error(folder, short, ids)
    row = found[0]
    return row | {name: json.loads(row[name]) for name in _JSON_COLUMNS if name in row}


def _unknown_error(folder: RunFolder, asked: str, ids: list[str]) -> ConfigError:
    near = difflib.get_close_matches(asked, map(short_id, ids), n=NEAR)
    there_are = f"near it are {', '.join(sorted(near))}" if near else describe_groups(folder)
    form = "give an id of `rollmill inspect RUN --trajectories`, such as 12.3"
    return ConfigError("TRAJECTORY", asked, f"the run has no such trajectory; {there_are}; {form}")
