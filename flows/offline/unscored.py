"""The trajectories of a run that a scorer has not scored yet, step by step, read from the run's folder."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from rollmill.flows.configuration.config import AnnotateConfig, RescoreConfig
from rollmill.tasks.errors import ConfigError
from rollmill.tasks.look.tables.run_frames import RunFrames
from rollmill.tasks.look.tables.view import escape_controls
from rollmill.tasks.score.scoring import Scoring
from rollmill.tasks.score.stored_scores import (
    SCORING_COLUMNS,
    groups_to_score,
    read_group_sizes,
    scores_to_keep,
)
from rollmill.tasks.score.terms import resolve_terms
from rollmill.tasks.store.folders import RunFolder
from rollmill.tasks.store.reader import list_scorers, list_steps, read
from rollmill.tasks.store.rows import (
    Rows,
    column_values,
    concat_rows,
    rows_from_table,
    rows_where,
    rows_where_in,
    rows_without,
)

# The columns of a group in a condition that are by a scorer.
REWARD_COLUMNS = re.compile("reward|n_scored", re.IGNORECASE)
SCORES = ("group", "trajectory_id", "status", "error_type", "error")
IDS = ("group", "sample", "trajectory_id", "status")


@dataclass(frozen=True, slots=True)
class UnscoredStep:
    """Counts of the chosen trajectories of one step that a scorer has scored and has not scored.

    Attributes:
        dataset: holds the trajectories.
        step: their step; for held-out trajectories the policy version.
        n_trajectories: trajectories without a score.
        n_scored: trajectories with a score, failed ones included.
        n_failed: trajectories with a failed score.
        first_error: type and text, of the failed scores; empty if there are none.
    """

    dataset: Literal["rollouts", "evaluations"]
    step: int
    n_trajectories: int = 0
    n_scored: int = 0
    n_failed: int = 0
    first_error: str = ""

    @property
    def scores(self) -> str:
        """Name of the data set for the scores: "scores" of rollouts, "evaluation_scores" of held-out trajectories."""
        return "scores" if self.dataset == "rollouts" else "evaluation_scores"


def check_rescoring(folder: RunFolder, config: RescoreConfig) -> None:
    """Refuse a scorer that cannot be loaded, a choice of held-out trajectories that is not possible, or one without any trajectory.

    Raises:
        ConfigError: names the setting.
    """
    if resolve_terms(config.score).by_group and config.evaluations:
        remedy = "held-out trajectories are scored one by one, and this scorer compares the trajectories of a group"
        raise ConfigError("evaluations", True, remedy)
    if config.where and config.evaluations:
        remedy = "held-out trajectories are in no group that `where` could choose; rescore them without it"
        raise ConfigError("evaluations", True, remedy)
    if not _list_steps(folder, config):
        raise no_step_error(folder, config)
    if config.where:
        find_groups(folder, config.where)


def is_rescored(folder: RunFolder, config: RescoreConfig) -> bool:
    """Return True if every trajectory that `config` selects has a score by its scorer; failed scores count."""
    config = config.model_copy(update={"redo_failed": False})
    unscored = UnscoredRows(folder, config, Scoring(config.score, run=""))
    return not any(step.n_trajectories for step in unscored.count_steps())


class UnscoredRows:
    """Reads the trajectories of a run that one scorer has not scored yet, and that scorer's scores of the others.

    Args:
        folder: of the run.
        config: bounds of the steps, the condition that groups meet, and whether failed scores are replaced.
        scoring: the scorer.
    """

    def __init__(self, folder: RunFolder, config: RescoreConfig, scoring: Scoring) -> None:
        self._folder, self._config, self._scoring = folder, config, scoring

    def count_steps(self) -> list[UnscoredStep]:
        """Count scored and unscored trajectories of each stored step that `config` selects, fully scored steps included."""
        return [self._count(step) for step in _list_steps(self._folder, self._config)]

    def read_groups(self, step: UnscoredStep, columns: Sequence[str] = SCORING_COLUMNS) -> list[Rows]:
        """Return the trajectories of a step that are to be scored, one table for each group.

        A failed score that is to be replaced counts as none. The default columns are those that a scorer reads.
        """
        rows = self._select(
            step, rows_from_table(read(self._folder, step.dataset, columns, **_partition(step)))
        )
        scored = self._split_scores(step, SCORES)[0]
        return groups_to_score(
            rows, set(column_values(scored, "trajectory_id")), whole=self._group_sizes(step)
        )

    def read_kept_scores(self, step: UnscoredStep) -> tuple[Rows, int]:
        """Return a step's scores that are kept, with all columns, and the number of its scores that are to be replaced."""
        kept, others, n_stale = self._split_scores(step, None)
        return concat_rows(kept, others), n_stale

    @cached_property
    def _chosen(self) -> Mapping[int, set[int]]:
        return find_groups(self._folder, self._config.where)

    def _select(self, step: UnscoredStep, rows: Rows) -> Rows:
        """Return the rows of a step's groups that meet the condition."""
        return rows_where_in(rows, "group", self._chosen.get(step.step, ())) if self._config.where else rows

    def _count(self, step: UnscoredStep) -> UnscoredStep:
        scores = self._split_scores(step, SCORES)[0]
        failed = rows_where(scores, "status", "failed")
        return replace(
            step,
            n_trajectories=sum(rows.num_rows for rows in self.read_groups(step, IDS)),
            n_scored=scores.num_rows,
            n_failed=failed.num_rows,
            first_error=describe_first_error(failed),
        )

    def _split_scores(self, step: UnscoredStep, columns: Sequence[str] | None) -> tuple[Rows, Rows, int]:
        """Return a step's scores that are kept, those of groups that were not chosen, and the number of scores to replace."""
        rollouts = rows_from_table(read(self._folder, step.dataset, IDS, **_partition(step)))
        stored = read(self._folder, step.scores, columns, scorer=self._scoring.key, step=step.step)
        every = rows_from_table(stored)
        scores = self._select(step, every)
        kept = scores_to_keep(
            self._select(step, rollouts),
            scores,
            whole=self._group_sizes(step),
            redo_failed=self._config.redo_failed,
        )
        others = (
            rows_without(every, "group", self._chosen.get(step.step, ()))
            if self._config.where
            else every.slice(0, 0)
        )
        return kept, others, scores.num_rows - kept.num_rows

    def _group_sizes(self, step: UnscoredStep) -> dict[int, int] | None:
        """Return how many survivors each finished group needs to be scored, by group number, for a group scorer.

        None for scorers of single trajectories.
        """
        if not self._scoring.by_group:
            return None
        sizes = read_group_sizes(self._folder, step.step)
        return {group: size if self._config.score.needs_full_group else 0 for group, size in sizes.items()}


def _list_steps(folder: RunFolder, config: RescoreConfig) -> list[UnscoredStep]:
    """Return the stored steps from first_step to last_step, not counted yet.

    If `config.evaluations` is set, the policy versions of held-out trajectories within these bounds follow.
    """
    datasets: list[Literal["rollouts", "evaluations"]] = ["rollouts"]
    if config.evaluations:
        datasets.append("evaluations")
    return [
        UnscoredStep(dataset, step)
        for dataset in datasets
        for step in select_steps(list_steps(folder, dataset), config)
    ]


def describe_first_error(failed: Rows) -> str:
    """Return type and text of the first of some failed scores; empty if there are none. Example: "ValueError: no number"."""
    first = failed.slice(0, 1).select(["error_type", "error"]).to_pylist()
    return escape_controls(": ".join(first[0].values())) if first else ""


def select_steps(stored: Sequence[int], config: RescoreConfig | AnnotateConfig) -> list[int]:
    """Return those of the stored steps that are from first_step to last_step."""
    last = config.last_step if config.last_step >= 0 else math.inf
    return [step for step in stored if config.first_step <= step <= last]


def no_step_error(folder: RunFolder, config: RescoreConfig | AnnotateConfig) -> ConfigError:
    """Return the error of a run without a step from first_step to last_step; it says which rollouts there are."""
    stored = list_steps(folder, "rollouts")
    there_are = f"steps {stored[0]} to {stored[-1]}" if stored else "no step"
    bounds = f"no step is from first_step = {config.first_step} to last_step = {config.last_step}"
    return ConfigError(
        "--steps", config.first_step, f"{bounds}; {folder.location} has rollouts of {there_are}"
    )


def find_groups(folder: RunFolder, where: str) -> Mapping[int, set[int]]:
    """Return the groups that meet a condition in SQL, by step; its rewards are those that the run trains on.

    Raises:
        ConfigError: it is no condition, no group meets it, or it has rewards and the run does not say by which scorer.
    """
    known = list_scorers(folder)
    # Without rewards any will do: a run with several scorers need not say which one it trains on.
    scorer = known[0] if known and not REWARD_COLUMNS.search(where) else ""
    found = RunFrames([folder], scorer).find_groups("where", where)
    if not found:
        raise ConfigError("where", where, f"no group of {folder.location} meets it")
    return found


def _partition(step: UnscoredStep) -> dict[str, int]:
    return {"version" if step.dataset == "evaluations" else "step": step.step}
